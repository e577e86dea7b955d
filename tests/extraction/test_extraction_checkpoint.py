"""Network files: the published layouts give their network back, all else is refused by name and runs nothing."""

import io
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch

from lattqe.errors import LattqeError
from lattqe.extraction.resnet import TORCHVISION_CHILDREN, read_checkpoint


def bytes_of(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True])
def test_published_file_gives_the_same_output(network, published, legacy):
    checkpoint = read_checkpoint(published(legacy=legacy), "net.pth")
    assert (checkpoint.architecture, checkpoint.whitening) == ("resnet50", True)
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(checkpoint.build()(x), network(x))


def test_training_checkpoint_with_other_entries(hollow, published):
    content = torch.load(io.BytesIO(published(hollow)), weights_only=True)
    data = bytes_of({"epoch": 7, "min_loss": 0.1, "optimizer": {"state": {}}, **content})
    assert read_checkpoint(data, "net.pth").architecture == "resnet50"


def test_numpy_in_meta_is_read(hollow, published):
    mean_vector = np.arange(4, dtype=np.float32).reshape(4, 1)
    projection = np.asfortranarray(np.arange(12, dtype=">f8").reshape(3, 4))
    data = published(
        hollow,
        mean=np.array([0.4, 0.5, 0.6]),
        outputdim=np.int64(2048),
        Lw={"retrieval-SfM-120k": {"ms": {"m": mean_vector, "P": projection}}},
    )
    checkpoint = read_checkpoint(data, "net.pth")
    assert checkpoint.mean == (0.4, 0.5, 0.6)
    found = checkpoint.post_whitening["retrieval-SfM-120k"]["ms"]
    np.testing.assert_array_equal(found["m"], mean_vector)
    np.testing.assert_array_equal(found["P"], projection)


def test_numpy_1_module_names_are_read(hollow, published):
    """Files written with numpy 1 say numpy.core where numpy 2 says numpy._core."""
    data = published(hollow, legacy=True, Lw={"set": {"ms": {"m": np.ones((2, 1)), "P": np.eye(2)}}})
    assert b"numpy._core.multiarray" in data
    old = data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert old != data
    np.testing.assert_array_equal(read_checkpoint(old, "net.pth").post_whitening["set"]["ms"]["P"], np.eye(2))


def test_files_without_batch_counters(network, published):
    """torch before 0.4.1 did not count batches."""
    state = OrderedDict((key, value) for key, value in network.state_dict().items() if "num_batches" not in key)
    built = read_checkpoint(published(state), "net.pth").build()
    with torch.inference_mode():
        assert torch.equal(built(torch.ones(1, 3, 32, 32)), network(torch.ones(1, 3, 32, 32)))


@pytest.mark.parametrize("names", ["torchvision", "numbered"])
def test_bare_convolutions(network, names):
    back = {number: child for child, number in TORCHVISION_CHILDREN.items()}
    state = {}
    for key, value in network.features.state_dict().items():
        child, rest = key.split(".", 1)
        state[f"{back[child] if names == 'torchvision' else child}.{rest}"] = value
    if names == "torchvision":
        state |= {"fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    checkpoint = read_checkpoint(bytes_of(OrderedDict(state)), "resnet50.pth")
    assert (checkpoint.architecture, checkpoint.whitening) == ("resnet50", False)
    built = checkpoint.build()
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(built.features(x), network.features(x))
    assert built.pool.p.item() == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("features.5.2.conv2.weight"), "'features.5.2.conv2.weight' is missing"),
        (lambda s: s.update({"lwhiten.weight": torch.zeros(1)}), "'lwhiten.weight' is unexpected"),
        (
            lambda s: s.update({"whiten.bias": torch.zeros(512)}),
            r"'whiten.bias' has shape \(512,\), expected \(2048,\)",
        ),
        (lambda s: s.update({"pool.p": torch.tensor([float("nan")])}), "'pool.p' holds NaN or infinity"),
        (lambda s: s.update({"pool.p": "three"}), r"'pool.p' has shape None"),
    ],
)
def test_wrong_keys_are_refused_by_name(hollow, published, change, message):
    state = dict(hollow)
    change(state)
    with pytest.raises(LattqeError, match=message):
        read_checkpoint(published(state), "net.pth")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"architecture": "vgg16"}, "'vgg16' is not known"),
        ({"architecture": "resnet101"}, r"not a resnet101 .*'features.6.6.conv1.weight' is missing"),
        ({"pooling": "rmac"}, "pooling = 'rmac', and only 'gem'"),
        ({"regional": True}, "regional = True"),
        ({"local_whitening": True}, "local_whitening = True"),
        ({"whitening": False}, "'whiten.weight' is unexpected"),
        ({"mean": [0.5, 0.5]}, r"mean = \[0.5, 0.5\]"),
        ({"std": [0.2, 0.2, 0.0]}, "std"),
    ],
)
def test_wrong_meta_is_refused_by_value(hollow, published, meta, message):
    with pytest.raises(LattqeError, match=message):
        read_checkpoint(published(hollow if "missing" in message or "unexpected" in message else {}, **meta), "net.pth")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class ForgedArray:
    """An array of objects that claims, in its dtype's flags, to be plain memory: its bytes would become pointers."""

    class Dtype:
        def __reduce__(self):
            return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)

    def __reduce__(self):
        return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1,), self.Dtype(), False, b"\x41" * 8)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["meta", "state", "top"])
def test_hostile_file_runs_nothing(tmp_path, where, legacy):
    canary = tmp_path / "canary"
    content = {
        "meta": {"mean": Touch(canary)} if where == "meta" else {},
        "state_dict": {"pool.p": Touch(canary)} if where == "state" else {},
    }
    data = bytes_of(Touch(canary) if where == "top" else content, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(LattqeError, match=r"refused.*(posix|nt)\.system"):
        read_checkpoint(data, "evil.pth")
    assert not canary.exists()
    if legacy:  # the canary sings where loading is careless
        torch.load(io.BytesIO(data), weights_only=False)
        assert canary.exists()


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), ForgedArray(), np.array([(1, 2.0)], dtype="i4,f4")])
def test_arrays_of_anything_but_numbers_are_refused(published, array):
    with pytest.raises(LattqeError, match=r"only (plain )?numbers and strings are read|the unreadable type"):
        read_checkpoint(published({}, Lw=array), "net.pth")


@pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x02.", b"PK\x03\x04 not a zip"])
def test_garbage_is_refused(data):
    with pytest.raises(LattqeError, match=r"net\.pth: refused"):
        read_checkpoint(data, "net.pth")


def test_truncated_file_is_refused(hollow, published):
    data = published(hollow)
    with pytest.raises(LattqeError, match="refused"):
        read_checkpoint(data[: len(data) // 2], "net.pth")


def test_unknown_layout_names_its_keys():
    with pytest.raises(LattqeError, match=r"keys 'encoder\.weight' are of no known layout"):
        read_checkpoint(bytes_of({"encoder.weight": torch.zeros(1)}), "net.pth")
    with pytest.raises(LattqeError, match="holds a list"):
        read_checkpoint(bytes_of([1]), "net.pth")
