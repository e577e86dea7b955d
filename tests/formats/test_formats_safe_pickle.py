"""The pickle reader gives what pickle gives for plain data, and refuses the rest without running any of it."""

import io
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.formats.pickle_file import load, loads
from lattqe.formats.tensors import load_torch

PROTOCOLS = range(6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(SCALARS, inner) | st.tuples(inner, inner) | st.frozensets(SCALARS),
    max_leaves=12,
)
ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "big endian": np.arange(6, dtype=">f8").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
    "text": np.array(["a", "ünï"]),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 5), np.float32),
    "large": np.arange(40_000, dtype=np.float32),
}


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@settings(max_examples=60, deadline=None)
@given(value=PLAIN, protocol=st.sampled_from(PROTOCOLS))
def test_plain_values_come_back(value, protocol):
    assert loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_scalars_come_back(protocol):
    value = {**ARRAYS, "again": ARRAYS["float32"], "scalar": np.float32(1.5), "ordered": OrderedDict(a=1)}
    read = loads(pickle.dumps(value, protocol))
    assert list(read) == list(value)
    for name, array in ARRAYS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    assert read["again"] is read["float32"]
    assert (read["scalar"], read["ordered"]) == (value["scalar"], value["ordered"])


def test_python2_strings_and_arrays_are_latin1():
    """Written by hand as Python 2 wrote it: byte strings where Python 3 has text and bytes."""
    raw = np.array([1.0, -2.0], "<f4").tobytes()
    data = (
        b"\x80\x02}(U\x02k\xfccnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01K\x02\x85cnumpy\ndtype\n(U\x02f4K\x00K\x01tR(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"U" + bytes([len(raw)]) + raw + b"tbu."
    )
    assert pickle.loads(data, encoding="latin1").keys() == loads(data).keys() == {"kü"}
    np.testing.assert_array_equal(loads(data)["kü"], [1.0, -2.0])


def hostile(canary):
    import os

    touch = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, f"touch {canary}"),
        "eval": Calls(eval, touch),
        "exec": Calls(exec, touch),
        "subprocess": Calls(subprocess.Popen, [sys.executable, "-c", touch]),
        "getattr": Calls(getattr, "x", "upper"),
        "in a list": [1, [Calls(eval, touch)]],
        "in an object array": {"vecs": np.array([Calls(eval, touch)], dtype=object)},
        "as a key": {(1, 2): 1, "x": Calls(exec, touch)},
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_hostile_pickles_execute_nothing(tmp_path, protocol):
    canary = tmp_path / "canary"
    for name, thing in hostile(canary).items():
        path = tmp_path / "hostile.pkl"
        path.write_bytes(pickle.dumps(thing, protocol))
        with pytest.raises(LattqeError, match="refused"):
            load(path)
        assert not canary.exists(), name


def test_the_canary_would_have_sung(tmp_path):
    """The hostile pickles above do run under pickle itself; otherwise the test above could not fail."""
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(hostile(canary)["eval"]))
    assert canary.exists()


def test_refusals_name_what_was_asked_for():
    with pytest.raises(LattqeError, match=r"'posix\.system'|'nt\.system'"):
        loads(pickle.dumps(hostile("x")["os.system"]))
    with pytest.raises(LattqeError, match="Python objects"):
        loads(pickle.dumps(np.array([None, {}], dtype=object)))


HAND_WRITTEN = {
    "instance": b"(ios\nsystem\n.",
    "object": b"(cbuiltins\nset\no.",
    "newobj": b"\x80\x02cbuiltins\nset\n)\x81.",
    "persistent id": b"Pabc\n.",
    "binary persistent id": b"\x80\x02K\x01Q.",
    "extension": b"\x80\x02\x82\x01.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "dotted attribute": b"\x80\x04\x8c\x05numpy\x8c\rndarray.dumps\x93.",
    "call of a string": b"\x8c\x02os)R.",
    "ndarray called": b"cnumpy\nndarray\n(I1000000000000\nttR.",
    "bytes of a number": b"cbuiltins\nbytearray\n(I1000000000000\ntR.",
    "unhashable": b"}]K\x01s.",
    "missing mark": b"\x80\x02K\x01t.",
    "two values": b"K\x01K\x02.",
    "nothing": b".",
    "future protocol": b"\x80\x09N.",
    "unknown operation": b"\xff.",
    "unquoted": b"Sabc\n.",
    "unknown memo": b"\x80\x02h\x05.",
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_other_programs_are_refused(name):
    with pytest.raises(LattqeError):
        loads(HAND_WRITTEN[name])


BOMBS = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "memo": b"\x80\x02]r\xff\xff\xff\xff00.",
    "array": pickle.dumps(np.zeros(3, np.float32), 2).replace(b"K\x01K\x03\x85", b"K\x01J\xff\xff\xff\x7f\x85"),
    # A megabyte of text encoded again and again: ten bytes of program each.
    "repeated call": b"\x80\x04" + b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"\x940"
    + b"c_codecs\nencode\n\x940" + b"h\x01h\x00\x85R" * 100_000 + b".",
    # A tuple of itself, doubled sixty times: hashing it takes 2^60 steps.
    "hash": b"\x80\x04}K\x01" + b"2\x86" * 60 + b"K\x01s.",
}  # fmt: skip


@pytest.mark.timeout(120)  # instead of never
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_allocate(name):
    with pytest.raises(LattqeError):
        loads(BOMBS[name])


def test_every_truncation_is_refused():
    data = pickle.dumps({"vecs": ARRAYS["float32"], "names": ["a", "b"]}, 4)
    for length in range(len(data)):
        with pytest.raises(LattqeError):
            loads(data[:length])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty.pkl").touch()
    for name, words in {"empty.pkl": "is empty", "absent.pkl": "does not exist", ".": "is a directory"}.items():
        with pytest.raises(LattqeError, match=words):
            load(tmp_path / name)


def saved(content, legacy):
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_as_torch_reads_them(legacy):
    """All kinds of elements, shapes and views; tensors that share a storage; parameters; numpy beside them."""
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    content = {
        "base": base,
        "view": base[1, :, 1:3],
        "turned": base.permute(2, 0, 1),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 5),
        "half": torch.randn(3).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "number": 0.5,
        "array": np.eye(2),
        "list": [1, "two", (torch.ones(1),)],
        "count": torch.tensor([2**40]),
    }
    found = load_torch(saved(content, legacy), "x.pth", torch.from_numpy)
    expected = torch.load(io.BytesIO(saved(content, legacy)), weights_only=False)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            wanted = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()
            assert found[name].dtype == wanted.dtype
            assert torch.equal(found[name], wanted)
    assert (found["number"], found["list"][:2]) == (0.5, [1, "two"])
    np.testing.assert_array_equal(found["array"], np.eye(2))
    found["base"][0] = -1  # arrays of their own, not views of the file
    assert float(found["view"][0, 0]) == float(base[1, 0, 1])


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_torch_files_are_refused_or_read(legacy):
    data = saved({"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.ones(4)}}, legacy)
    outcomes, refusals = [], []
    for position in range(0, len(data), 3):
        for damaged in (data[:position], data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]):
            try:
                outcomes.append(load_torch(damaged, "x.pth", torch.from_numpy))
            except LattqeError as error:
                refusals.append(str(error))
    assert all("x.pth" in refusal for refusal in refusals)
    assert len(refusals) > len(data) // 3  # each cut at least; some bytes say nothing: padding, times


def test_torch_files_that_unfold_to_more_than_they_are():
    """Thousands of tensors may share one storage."""
    base = torch.zeros(100_000)
    data = saved([base.view(-1)[: 99_000 + row] for row in range(1000)], False)
    with pytest.raises(LattqeError, match="expand to far more than its own size"):
        load_torch(data, "x.pth", torch.from_numpy)
