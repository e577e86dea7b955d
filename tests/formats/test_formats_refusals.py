"""Every bad file is one clear line, and a hostile one executes nothing."""

import pickle
import zipfile
from contextlib import suppress

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import scipy.io
import torch

from lattqe.errors import LattqeError
from lattqe.formats import ENDINGS, open_source
from lattqe.formats.arrow_parquet import declared_values

X = np.ones((4, 3), np.float32)


class Touches:
    """Under plain unpickling, makes a file."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return open, (self.canary, "w")


def read_all(path, **options):
    for block in open_source(path, **options).blocks(2):
        assert block.vectors.ndim == 2


def refusal(path, **options):
    """The refusal of a file: always one line that names the file."""
    with pytest.raises(LattqeError) as caught:
        read_all(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


@pytest.mark.parametrize("ending", ENDINGS)
def test_empty_truncated_or_foreign_content(tmp_path, ending):
    path = tmp_path / f"x{ending}"
    path.touch()
    assert "is empty" in refusal(path)
    path.write_bytes(b"\x00")
    refusal(path)
    path.write_bytes(b"<html>not found</html>" * 50)
    refusal(path)


def test_paths_that_are_no_files(tmp_path):
    assert "does not exist" in refusal(tmp_path / "absent.npy")
    (tmp_path / "folder.npy").mkdir()
    assert "directory" in refusal(tmp_path / "folder.npy")
    assert "directory" in refusal(tmp_path)
    assert all(ending in refusal(tmp_path / "x.docx") for ending in ENDINGS)
    locked = tmp_path / "locked.npy"
    np.save(locked, X)
    locked.chmod(0)
    try:
        with open(locked, "rb"):
            pytest.skip("this user may read everything: run the tests as a user other than root")
    except PermissionError:
        assert "Permission denied" in refusal(locked)


@pytest.mark.parametrize(
    ("array", "words"),
    [(np.ones(5), r"shape (5,)"), (np.ones((2, 3, 4)), "a matrix"), (np.float32(1), "a matrix"),
     (np.ones((0, 3)), "is empty: its shape is 0 × 3"), (np.ones((3, 0)), "is empty: its shape is 3 × 0"),
     (np.ones((2, 2), complex), "complex128"), (np.array([["a", "b"]]), "<U1"), (np.ones((2, 2), bool), "bool"),
     (np.array([[None, 1]]), "object"), (np.zeros((2, 2), "M8[s]"), "datetime64"),
     (np.zeros((2, 2), [("a", "f4")]), "'a'")],
)  # fmt: skip
def test_arrays_that_hold_no_vectors(tmp_path, array, words):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    assert words in refusal(tmp_path / "x.npy")


def write_each(folder):
    """One whole file of each format."""
    np.save(folder / "x.npy", X)
    scipy.io.savemat(folder / "x.mat", {"X": X.T})
    (folder / "x.pkl").write_bytes(pickle.dumps({"vecs": X.T}))
    np.hstack([np.full((4, 1), 3, np.int32), X.view(np.int32)]).tofile(folder / "x.fvecs")
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = X
    table = pa.table({"vector": pa.array(X.tolist())})
    pq.write_table(table, folder / "x.parquet")
    with pa.ipc.new_file(folder / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    torch.save(torch.from_numpy(X), folder / "x.pt")
    safetensors.numpy.save_file({"x": X}, folder / "x.safetensors")
    return sorted(folder.glob("x.*"))


def test_every_truncation_is_refused(tmp_path):
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in write_each(tmp_path):
        data = path.read_bytes()
        read_all(path)
        for length in {1, 7, len(data) // 3, len(data) // 2, len(data) * 9 // 10, len(data) - 1}:
            (cut / path.name).write_bytes(data[:length])
            whole_rows = path.suffix == ".fvecs" and length % 16 == 0
            padding = path.suffix in (".h5", ".mat") and length == len(data) - 1
            if not whole_rows and not padding:
                refusal(cut / path.name)


def test_a_file_cut_short_while_it_is_read(tmp_path):
    """No signal from a memory map: the next block is refused."""
    path = tmp_path / "x.npy"
    np.save(path, np.ones((1000, 16), np.float32))
    blocks = open_source(path).blocks(100)
    next(blocks)
    with path.open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(LattqeError, match="is truncated"):
        list(blocks)


def test_fvecs_rows_of_another_dimension(tmp_path):
    rows = np.hstack([np.full((4, 1), 3, np.int32), X.view(np.int32)])
    rows[2, 0] = 5
    rows.tofile(tmp_path / "x.fvecs")
    assert "row 2 has dimension 5, the first row has 3" in refusal(tmp_path / "x.fvecs")


def test_tables_with_holes(tmp_path):
    holes = {
        "row 1 has no vector": [[1.0, 2.0], None],
        "the vector of row 1 lacks a number": [[1.0, 2.0], [None, 1.0]],
        "row 1 has 3 dimensions, the first row has 2": [[1.0, 2.0], [1.0, 2.0, 3.0]],
    }
    for words, lists in holes.items():
        pq.write_table(pa.table({"vector": pa.array(lists)}), tmp_path / "x.parquet")
        assert words in refusal(tmp_path / "x.parquet")
    pq.write_table(pa.table({"vector": pa.array([[1.0], [2.0]]), "id": ["a", None]}), tmp_path / "x.parquet")
    assert "some rows have no id" in refusal(tmp_path / "x.parquet")
    pq.write_table(pa.table({"vector": pa.array(["a"]), "n": [1]}), tmp_path / "x.parquet")
    assert "no column of vectors" in refusal(tmp_path / "x.parquet")
    assert "holds int64; lists of numbers are needed" in refusal(tmp_path / "x.parquet", key="n")


@pytest.mark.parametrize("ending", ["pkl", "pickle", "pt", "pth"])
@pytest.mark.parametrize("place", ["top", "value", "object array"])
def test_hostile_files_execute_nothing(tmp_path, ending, place):
    canary = tmp_path / "canary"
    hostile = Touches(canary)
    value = {"top": hostile, "value": {"vecs": X, "x": hostile}, "object array": {"vecs": np.array([[hostile]])}}[place]
    path = tmp_path / f"x.{ending}"
    if ending.startswith("pk") or ending == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path)
    assert "refused" in refusal(path)
    assert not canary.exists()
    pickle.loads(pickle.dumps(value))
    assert canary.exists(), "the file is not hostile: the test proves nothing"


def test_torch_files_of_other_kinds(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    assert "torch.nn.modules.linear.Linear" in refusal(path)
    torch.save(torch.ones(3, 2), path, _use_new_zipfile_serialization=False)
    assert "torch.save it again" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "not from torch.save" in refusal(path)
    torch.save(torch.ones(1, 4).expand(1000, 4), path)
    assert "larger than its storage" in refusal(path)


def test_a_flipped_bit_in_a_torch_file_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.from_numpy(X), path)
    data = bytearray(path.read_bytes())
    data[data.index(X.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert "checksum" in refusal(path)


def test_hdf5_never_leads_to_other_files(tmp_path):
    secret = tmp_path / "secret.bin"
    np.ones(8, np.float32).tofile(secret)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = X
    path = tmp_path / "external.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (2, 4), np.float32, external=[(str(secret), 0, 32)])
    assert "other files" in refusal(path)
    path = tmp_path / "virtual.h5"
    layout = h5py.VirtualLayout((4, 3), np.float32)
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (4, 3))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    assert "other files" in refusal(path)
    path = tmp_path / "linked.h5"
    with h5py.File(path, "w") as file:
        file["x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
    assert "holds no matrix" in refusal(path)


@pytest.mark.timeout(120)  # instead of never
def test_hdf5_text_that_would_be_read_for_ever(tmp_path):
    """Free space of size 0 in a collection of texts: HDF5 2.0 does not get past it."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["vectors"] = X
        file["ids"] = ["a", "b", "c", "d"]
    read_all(path)
    data = bytearray(path.read_bytes())
    free = data.index(b"GCOL") + 16 + 3 * (16 + 8)  # behind three of the texts, each padded to 8 bytes
    data[free : free + 16] = b"\0" * 16
    path.write_bytes(data)
    assert "of /ids (1 bytes) is not where it should be" in refusal(path)


def test_hdf5_text_of_a_damaged_length(tmp_path):
    """The library would fill this length with zeros: 4 GB."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["vectors"] = X
        file["ids"] = ["a", "b", "c", "d"]
        offset = file["ids"].id.get_offset()
    data = bytearray(path.read_bytes())
    data[offset + 16 : offset + 20] = b"\xff" * 4
    path.write_bytes(data)
    assert "text 1 of /ids (4,294,967,295 bytes)" in refusal(path)


def test_declared_sizes_are_not_allocated(tmp_path):
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 512)})
        file.write(b"\0" * 64)
    assert "cut short" in refusal(path)
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (2, 1 << 40), np.float32, chunks=(1, 1024))
    assert "columns; at most" in refusal(path)
    path = tmp_path / "chunks.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 20, 1024), np.float32, chunks=(1 << 19, 1024))
    assert "chunks" in refusal(path)


def test_small_files_that_unfold_without_limit(tmp_path):
    """Rows that were declared and never written; one value, repeated. Honest compression stays below the limit."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("vectors", (10**9, 64), "f4", chunks=(1024, 64))
    assert "declares 1,000,000,000 × 64 numbers" in refusal(tmp_path / "x.h5")
    assert (tmp_path / "x.h5").stat().st_size < 100_000
    rows = 300_000
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * 64, np.float32)), 64)
    pq.write_table(pa.table({"vector": column}), tmp_path / "x.parquet", compression="zstd")
    assert "give --allow-expansion if this is intended" in refusal(tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", allow_expansion=True)
    assert (source.rows, next(source.blocks(10)).vectors.shape) == (rows, (10, 64))


def peak_of(path):
    """Bytes that Arrow takes at most while a file is refused, and the refusal."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        told = refusal(path)
    finally:
        pa.set_memory_pool(before)
    return pool.max_memory(), told


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_arrow_file_is_measured_before_it_is_unpacked(tmp_path, new, compression):
    path, options = tmp_path / "x.arrow", pa.ipc.IpcWriteOptions(compression=compression)

    def write(rows, hidden):
        beside = pa.array([0] * rows, pa.int8()) if hidden is None else pa.array([hidden] * rows)
        table = pa.table({"vector": pa.array([[1.0, 2.0]] * rows), "other": beside})
        with new(path, table.schema, options=options) as writer:
            writer.write_table(table)

    write(1000, None)
    assert next(open_source(path).blocks(10)).vectors.shape == (10, 2)
    write(100, "x" * (1 << 20))  # in a column that is not asked for
    assert path.stat().st_size < 1 << 20
    peak, told = peak_of(path)
    assert "give --allow-expansion if this is intended" in told
    assert peak < 64 << 20


def test_a_later_row_of_parquet_that_is_longer_than_all_others_is_not_read(tmp_path):
    long = 1 << 24
    offsets = pa.array([0, 2, 4, 4 + long], pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.array(np.ones(4 + long, np.float32)))
    pq.write_table(pa.table({"vector": column}), tmp_path / "x.parquet", compression="zstd")
    del column
    peak, told = peak_of(tmp_path / "x.parquet")
    assert "vectors of 16,777,220 numbers" in told
    assert peak < 64 << 20


@pytest.mark.parametrize(("group", "step"), [(None, 3), (7, 11)])  # six groups of rows repeat one footer
def test_values_of_parquet_are_counted_from_its_footer(tmp_path, group, step):
    """As pyarrow counts them; whatever byte of the footer is damaged, there is a number or a ValueError."""
    vectors = pa.array([[float(row)] * 5 for row in range(40)], pa.list_(pa.float32()))
    table = pa.table({"id": [f"é{row}" for row in range(40)], "vector": vectors, "flag": [True] * 40, "d": [0.5] * 40})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=group)
    found = pq.read_metadata(tmp_path / "x.parquet")
    columns = [found.row_group(n).column(c) for n in range(found.num_row_groups) for c in range(found.num_columns)]
    data = (tmp_path / "x.parquet").read_bytes()
    assert declared_values(pa.py_buffer(data)) == [(each.path_in_schema, each.num_values) for each in columns]
    for place in range(len(data) - found.serialized_size - 8, len(data) - 8, step):
        for flipped in (0x01, 0x0F, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flipped
            with suppress(ValueError):
                declared_values(pa.py_buffer(bytes(damaged)))


@pytest.mark.parametrize("kind", ["label", "id"])
@pytest.mark.parametrize("ending", ["parquet", "arrow", "arrow view"])
def test_one_long_text_that_many_rows_share(tmp_path, kind, ending):
    rows, path = 30_000, tmp_path / f"x.{ending.split()[0]}"
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 4000]))
    if ending == "arrow view":
        view = np.array([4000, 0, 0, 0], np.int32)  # its length, beginning, buffer and place there
        buffers = [None, pa.py_buffer(np.tile(view, rows)), pa.py_buffer(b"\0" * 4000)]
        texts = pa.Array.from_buffers(pa.string_view(), rows, buffers)
    table = pa.table({"vector": pa.array(np.ones((rows, 1), np.float32).tolist()), kind: texts})
    if ending == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(LattqeError, match=r"labels of 1?\d\d,\d{3},\d{3} bytes.*--allow-expansion"):
        for _ in open_source(path).blocks(rows):
            pass


@pytest.mark.parametrize("label", ["", "two\nlines", "x" * 5000, "nul\x00"])
def test_labels_that_are_no_labels(tmp_path, label):
    columns = {"vector": pa.array([[1.0], [2.0]]), "label": ["a", label]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert "the label of row 1 is" in refusal(tmp_path / "x.parquet")
    np.save(tmp_path / "x.npy", np.eye(2))
    if label and "\x00" not in label:  # numpy ends texts at their last character that is not 0
        np.save(tmp_path / "labels.npy", np.array(["a", label]))
        with pytest.raises(LattqeError, match=r"labels\.npy: the label of row 1 is"):
            open_source(tmp_path / "x.npy", labels=tmp_path / "labels.npy")


def test_a_damaged_page_of_a_declared_gigabyte_is_not_allocated(tmp_path):
    """Found by fuzzing: a buffered stream reserves what a page header declares before it looks at what is there."""
    path = tmp_path / "x.parquet"
    table = pa.table({"vector": pa.array([[1.0, 2.0]] * 50), "label": [f"class {row}" for row in range(50)]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    sizes = next(place for place in range(start, start + 16) if damaged[place] == 0x2C)  # where they end
    assert damaged[start : start + 3] == b"\x15\x00\x15"  # the page's type, then its sizes as numbers of 7 bits a byte
    gigabyte = b"\x15\x80\x80\x80\x80\x08"
    header = b"\x15\x00" + 2 * gigabyte + bytes(damaged[sizes : sizes + 40])
    damaged[start : start + len(header)] = header
    path.write_bytes(damaged)
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    assert "not a readable Parquet file" in refusal(path)
    assert pool.max_memory() <= max(before, 1 << 26)
