"""Each importer against files written plainly by the format's own library."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import scipy.io
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lattqe.errors import LattqeError
from lattqe.formats import ENDINGS, open_source
from lattqe.formats.hdf5_mat import datasets, read_variables
from lattqe.formats.reader import FORMATS

ROWS, DIM = 23, 7
X = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
Q = X[:4] + 1
IDS = [f"bild-{row}.jpg" for row in range(ROWS)]
LABELS = np.arange(ROWS, dtype=np.int32) % 5


def write_fvecs(path, matrix):
    dims = np.full((len(matrix), 1), matrix.shape[1], np.int32)
    np.hstack([dims, matrix.astype(np.float32).view(np.int32)]).tofile(path)


def write_h5(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def write_mat73(path, **arrays):
    """MATLAB writes column by column what HDF5 reads row by row, after 512 bytes of its own."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array.T, chunks=True, compression="gzip")
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")


def table(dtype=None, size=DIM):
    dtype = dtype or pa.float32()
    lists = pa.array(X.astype(dtype.to_pandas_dtype()).tolist(), pa.list_(dtype, size) if size else pa.list_(dtype))
    return pa.table({"id": IDS, "vector": lists, "label": pa.array(LABELS)})


def write_arrow(path, content, stream=False, **options):
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(path, content.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(content, max_chunksize=5)


WRITERS = {
    "plain.npy": lambda path: np.save(path, X),
    "columns first.npy": lambda path: np.save(path, np.asfortranarray(X)),
    "big endian.npy": lambda path: np.save(path, X.astype(">f4")),
    "double.npy": lambda path: np.save(path, X.astype(np.float64)),
    "v5.mat": lambda path: scipy.io.savemat(path, {"X": X.T, "Q": Q.T}),
    "v5 compressed.mat": lambda path: scipy.io.savemat(path, {"X": X.T}, do_compression=True),
    "v5 small integers.mat": lambda path: scipy.io.savemat(path, {"X": X.T, "n": np.uint8([[1, 2]]), "s": "text"}),
    "v7.3.mat": lambda path: write_mat73(path, X=X.T, Q=Q.T),
    "protocol 2.pkl": lambda path: Path(path).write_bytes(pickle.dumps({"vecs": X.T}, 2)),
    "protocol 5.pickle": lambda path: Path(path).write_bytes(pickle.dumps({"features": X, "names": IDS}, 5)),
    "bare.pkl": lambda path: Path(path).write_bytes(pickle.dumps(X)),
    "plain.fvecs": lambda path: write_fvecs(path, X),
    "plain.h5": lambda path: write_h5(path, **{"deep/features": X, "other": X[0]}),
    "lists.parquet": lambda path: pq.write_table(table(size=None), path, row_group_size=6),
    "fixed.parquet": lambda path: pq.write_table(table(), path),
    "doubles.parquet": lambda path: pq.write_table(table(pa.float64()), path),
    "file.arrow": lambda path: write_arrow(path, table()),
    "stream.arrow": lambda path: write_arrow(path, table(), stream=True),
    "compressed.arrow": lambda path: write_arrow(path, table(), compression="zstd"),
    "bare.pt": lambda path: torch.save(torch.from_numpy(X), path),
    "dict.pth": lambda path: torch.save({"x": torch.from_numpy(X), "bias": torch.zeros(3), "n": 5}, path),
    "transposed view.pt": lambda path: torch.save(torch.from_numpy(X.T.copy()).T, path),
    "cut view.pt": lambda path: torch.save(torch.from_numpy(np.hstack([X, X]))[:, :DIM], path),
    "parameter.pt": lambda path: torch.save({"x": torch.nn.Parameter(torch.from_numpy(X))}, path),
    "plain.safetensors": lambda path: safetensors.torch.save_file({"a": torch.from_numpy(X), "b": torch.ones(2)}, path),
}


def collect(source, size=5):
    """All blocks together, after checking that each is what it should be."""
    blocks = list(source.blocks(size))
    for block in blocks:
        assert 0 < len(block.vectors) <= size
        assert block.vectors.flags.c_contiguous
        assert len(block.ids) == len(block.vectors)
    vectors = np.concatenate([block.vectors for block in blocks])
    assert vectors.shape == (source.rows, source.dim)
    labels = np.concatenate([block.labels for block in blocks]) if source.has_labels else None
    return vectors, [id for block in blocks for id in block.ids], labels


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_every_format_gives_the_matrix_back(tmp_path, name, size):
    path = tmp_path / name
    WRITERS[name](path)
    vectors, ids, labels = collect(open_source(path), size)
    np.testing.assert_array_equal(vectors, X)
    if path.suffix in (".parquet", ".arrow"):
        assert ids == IDS
        np.testing.assert_array_equal(labels, LABELS)
    else:
        assert ids == [f"{path.stem}-{row}" for row in range(ROWS)]
        assert labels is None


def test_every_ending_is_tried():
    assert {Path(name).suffix for name in WRITERS} | {".hdf5"} == set(ENDINGS)
    assert len(ENDINGS) == len({ending for format in FORMATS for ending in format.endings})


@pytest.mark.parametrize(
    ("name", "dtype", "kept"),
    [("half", np.float16, np.float16), ("bytes", np.uint8, np.float32), ("ints", np.int64, np.float64),
     ("long double", np.longdouble, np.float64)],
)  # fmt: skip
def test_numbers_keep_their_precision(tmp_path, name, dtype, kept):
    matrix = (np.abs(X) * 20).astype(dtype)
    np.save(tmp_path / "x.npy", matrix)
    vectors, _, _ = collect(open_source(tmp_path / "x.npy"))
    assert vectors.dtype == kept
    np.testing.assert_array_equal(vectors, matrix.astype(kept))


def test_bfloat16_is_read(tmp_path):
    tensor = torch.from_numpy(X).bfloat16()
    torch.save(tensor, tmp_path / "x.pt")
    safetensors.torch.save_file({"x": tensor}, tmp_path / "x.safetensors")
    for ending in ("pt", "safetensors"):
        vectors, _, _ = collect(open_source(tmp_path / f"x.{ending}"))
        np.testing.assert_array_equal(vectors, tensor.float().numpy())


MATRICES = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64]),
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-4, 4, width=16),
)


@given(matrix=MATRICES, size=st.integers(1, 12), fortran=st.booleans())
def test_any_matrix_comes_back_through_npy_and_fvecs(tmp_path_factory, matrix, size, fortran):
    folder = tmp_path_factory.mktemp("any", numbered=True)
    np.save(folder / "x.npy", np.asfortranarray(matrix) if fortran else matrix)
    write_fvecs(folder / "x.fvecs", matrix)
    for name in ("x.npy", "x.fvecs"):
        vectors, _, _ = collect(open_source(folder / name), size)
        np.testing.assert_array_equal(vectors, matrix)


@pytest.mark.parametrize("name", ["v5.mat", "v7.3.mat"])
def test_mat_has_database_and_queries(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert any("'X'" in note for note in open_source(path).notes)
    np.testing.assert_array_equal(collect(open_source(path, key="Q"))[0], Q)
    np.testing.assert_array_equal(collect(open_source(path, key="Q", transposed=False))[0], Q.T)
    with pytest.raises(LattqeError, match=r"holds no 'Y'; it holds .*X"):
        open_source(path, key="Y")


def test_mat_variables_of_every_kind(tmp_path):
    """Listed by scipy's own reading; what is no matrix of numbers is refused by its kind."""
    values = {"double": X, "short": X.astype(np.int16), "cell": np.array([["a", 1]], object), "text": "hello",
              "struct": {"a": 1}, "complex": X * 1j, "cube": np.ones((2, 3, 4)), "flags": X > 0,
              "empty": X[:0]}  # fmt: skip
    for packed in (False, True):
        path = tmp_path / f"{packed}.mat"
        scipy.io.savemat(path, values, do_compression=packed)
        assert set(read_variables(path)) == {name for name, _, _ in scipy.io.whosmat(path)}
        for key in ("double", "short"):
            np.testing.assert_array_equal(collect(open_source(path, key=key, transposed=False))[0], values[key])
        for key, words in {"cell": "cell", "text": "char", "complex": "complex", "cube": "2, 3, 4", "flags": "logical",
                           "struct": "struct", "empty": "is empty"}.items():  # fmt: skip
            with pytest.raises(LattqeError, match=words):
                open_source(path, key=key)


def test_pickles_say_which_side_they_took_for_images(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"vecs": X.T}))
    assert any("columns of 'vecs' 7 × 23 are taken as images" in note for note in open_source(path).notes)
    np.testing.assert_array_equal(collect(open_source(path, transposed=False))[0], X.T)
    path.write_bytes(pickle.dumps({"features": X}))
    assert any("rows of 'features' 23 × 7" in note for note in open_source(path).notes)
    np.testing.assert_array_equal(collect(open_source(path, transposed=True))[0], X.T)


@pytest.mark.parametrize("name", ["plain.npy", "plain.h5", "bare.pt", "plain.safetensors"])
def test_transposed_turns_any_matrix_round(tmp_path, name):
    WRITERS[name](tmp_path / name)
    key = "deep/features" if name.endswith("h5") else None
    np.testing.assert_array_equal(collect(open_source(tmp_path / name, key=key, transposed=True))[0], X.T)


def test_a_pickle_from_image_to_vector(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(dict(zip(IDS, X))))
    vectors, ids, _ = collect(open_source(path))
    np.testing.assert_array_equal(vectors, X)
    assert ids == IDS


def test_ids_and_labels_of_the_same_file(tmp_path):
    write_h5(tmp_path / "x.h5", vectors=X, ids=IDS, labels=LABELS)
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"X": X.T, "ids": IDS, "labels": LABELS}))
    torch.save({"x": torch.from_numpy(X), "ids": IDS, "labels": torch.from_numpy(LABELS)}, tmp_path / "x.pt")
    scipy.io.savemat(tmp_path / "x.mat", {"X": X.T, "labels": LABELS.astype(float)}, do_compression=True)
    np.testing.assert_array_equal(collect(open_source(tmp_path / "x.mat"))[2], LABELS)
    for name in ("x.h5", "x.pkl", "x.pt"):
        _, ids, labels = collect(open_source(tmp_path / name))
        assert ids == IDS
        np.testing.assert_array_equal(labels, LABELS)
    write_h5(tmp_path / "y.h5", vectors=X, labels=LABELS[:3])
    source = open_source(tmp_path / "y.h5")
    assert not source.has_labels
    assert any("not used: it has 3 entries" in note for note in source.notes)


@pytest.mark.parametrize("layout", [{}, {"chunks": (5,)}, {"chunks": (5,), "maxshape": (None,)}])
def test_texts_of_hdf5(tmp_path, layout):
    texts = ["", "ä" * 9, "x" * 5000, *IDS[3:]]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("ids", data=texts, dtype=h5py.string_dtype(), **layout)
    assert [text.decode() for text in datasets(tmp_path / "x.h5")["ids"]] == texts


def test_texts_of_hdf5_of_one_length_or_compressed(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["vectors"] = X
        file["ids"] = np.array(IDS, "S")
    assert collect(open_source(tmp_path / "x.h5"))[1] == IDS
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["vectors"] = X
        file.create_dataset("ids", data=IDS, compression="gzip")
    with pytest.raises(LattqeError, match="uncommon way; give them in a file"):
        open_source(tmp_path / "y.h5")


def test_several_matrices_need_a_choice(tmp_path):
    write_h5(tmp_path / "x.h5", left=X, right=X + 1)
    with pytest.raises(LattqeError, match=r"several matrices: left \(23 × 7\), right .* --key"):
        open_source(tmp_path / "x.h5")
    np.testing.assert_array_equal(collect(open_source(tmp_path / "x.h5", key="/right"))[0], X + 1)
    columns = pa.table({"a": table()["vector"], "b": table()["vector"]})
    pq.write_table(columns, tmp_path / "x.parquet")
    with pytest.raises(LattqeError, match="several columns of vectors, a, b"):
        open_source(tmp_path / "x.parquet")
    np.testing.assert_array_equal(collect(open_source(tmp_path / "x.parquet", key="b"))[0], X)


def test_photos_are_read(photos_folder):
    path = photos_folder / "grocery81_vectors.npy"
    source = open_source(path, columns=128, labels=photos_folder / "grocery81_labels.npy")
    vectors, _, labels = collect(source, 1000)
    np.testing.assert_array_equal(vectors, np.load(path)[:, :128])
    np.testing.assert_array_equal(labels, np.load(photos_folder / "grocery81_labels.npy"))
