"""Several files as one: order, ids, labels, and which rows and columns are kept."""

import pickle

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io

from lattqe.errors import LattqeError
from lattqe.formats import open_source

X = np.arange(1, 31, dtype=np.float32).reshape(10, 3)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "x.npy", X[:4])
    np.save(tmp_path / "b" / "x.npy", X[4:])
    return [tmp_path / "x.npy", tmp_path / "b" / "x.npy"]


def collect(source):
    blocks = list(source.blocks(3))
    labels = np.concatenate([block.labels for block in blocks]) if source.has_labels else None
    return np.concatenate([block.vectors for block in blocks]), [id for block in blocks for id in block.ids], labels


def test_files_join_in_the_order_given_with_unique_ids(files):
    vectors, ids, _ = collect(open_source(files))
    np.testing.assert_array_equal(vectors, X)
    assert ids == [f"x-{row}" for row in range(4)] + [f"x.2-{row}" for row in range(6)]
    np.testing.assert_array_equal(collect(open_source(files[::-1]))[0], np.vstack([X[4:], X[:4]]))


def test_dimensions_that_differ_are_refused_naming_both(files, tmp_path):
    np.save(tmp_path / "wide.npy", np.ones((2, 5)))
    with pytest.raises(LattqeError, match=r"x\.npy has 3 dimensions and .*wide\.npy has 5"):
        open_source([*files, tmp_path / "wide.npy"])


@pytest.mark.parametrize("name", ["ids.txt", "ids.npy", "ids.csv", "one column.csv", "bytes.npy"])
def test_ids_beside_the_matrix(files, tmp_path, name):
    ids = [f"ü {row}" if name != "bytes.npy" else f"u{row}" for row in range(10)]
    path = tmp_path / name
    if name == "ids.txt":
        path.write_text("\n".join(ids) + "\n", encoding="utf-8")
    elif name.endswith(".npy"):
        np.save(path, np.array(ids, dtype="S" if name == "bytes.npy" else None))
    elif name == "ids.csv":
        path.write_text("number,ID\n" + "".join(f'{row},"{id}"\n' for row, id in enumerate(ids)), encoding="utf-8-sig")
    else:
        path.write_text("\n".join(ids), encoding="utf-8")
    assert collect(open_source(files, ids=path))[1] == ids


@pytest.mark.parametrize("kind", ["npy", "txt", "csv"])
def test_labels_beside_the_matrix(files, tmp_path, kind):
    path = tmp_path / f"labels.{kind}"
    numbers = [5, 3, 5, -1, 0, 7, 7, 7, 2, 2**31 - 1]
    if kind == "npy":
        np.save(path, np.array(numbers))
    else:
        path.write_text(("label\n" if kind == "csv" else "") + "\n".join(map(str, numbers)))
    source = open_source(files, labels=path)
    assert source.label_names is None
    labels = collect(source)[2]
    assert labels.dtype == np.int32
    assert labels.tolist() == numbers


def test_text_labels_are_numbered_in_alphabetical_order(files, tmp_path):
    (tmp_path / "labels.txt").write_text("cat dog ant cat bee ant dog cat cat cat".replace(" ", "\n"))
    source = open_source(files, labels=tmp_path / "labels.txt")
    assert source.label_names == ["ant", "bee", "cat", "dog"]
    assert collect(source)[2].tolist() == [2, 3, 0, 2, 1, 0, 3, 2, 2, 2]


def test_text_labels_are_numbered_over_all_files(tmp_path):
    for name, labels in {"a": ["x", "z"], "b": ["y", "x"]}.items():
        columns = {"vector": pa.array([[1.0, 2.0], [3.0, 4.0]]), "label": pa.array(labels).dictionary_encode()}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    source = open_source([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert source.label_names == ["x", "y", "z"]
    assert collect(source)[2].tolist() == [0, 2, 1, 0]


def test_labels_are_for_all_files_or_for_none(files, tmp_path):
    columns = {"vector": pa.array([[1.0, 2.0, 3.0]]), "label": [1]}
    pq.write_table(pa.table(columns), tmp_path / "y.parquet")
    with pytest.raises(LattqeError, match=r"x\.npy has no labels, .*y\.parquet has labels as numbers"):
        open_source([files[0], tmp_path / "y.parquet"])


@pytest.mark.parametrize(("rows", "kept"), [("2:5", (2, 3, 4)), (":3", (0, 1, 2)), ("8:", (8, 9)), ("-2:", (8, 9))])
def test_a_range_of_rows(files, rows, kept):
    source = open_source(files, rows=rows)
    vectors, ids, _ = collect(source)
    np.testing.assert_array_equal(vectors, X[list(kept)])
    assert source.rows == len(kept)
    assert ids == [f"x-{row}" if row < 4 else f"x.2-{row - 4}" for row in kept]


def test_masks_rows_and_values_select(files, tmp_path):
    mask = X[:, 0] % 2 == 0
    np.save(tmp_path / "mask.npy", mask)
    np.save(tmp_path / "rows.npy", np.flatnonzero(mask))
    split = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 2], np.int8)
    np.save(tmp_path / "split.npy", split)
    np.save(tmp_path / "names.npy", np.array(["train", "val", "test"])[split])
    expected = {
        ("mask.npy",): mask,
        ("rows.npy",): mask,
        ("mask.npy=0",): ~mask,
        ("split.npy=2",): split == 2,
        ("names.npy=test",): split == 2,
        ("split.npy=2", "mask.npy"): (split == 2) & mask,
    }
    for conditions, kept in expected.items():
        source = open_source(files, select=[f"{tmp_path}/{condition}" for condition in conditions], columns=2)
        np.testing.assert_array_equal(collect(source)[0], X[kept, :2])
        assert source.rows == kept.sum()


SELECTIONS = {
    "split.npy": "neither flags nor ascending row numbers .*=VALUE keeps one value",
    "split.npy=7": "no row has this value; there are 0, 1",
    "short.npy": "has 3 entries for 10 rows",
    "outside.npy": r"row 10 is outside of 0\.\.9",
    "none.npy": "no row of 10 is selected",
    "floats.npy": "float64",
    "absent.npy": "does not exist",
    "mask.txt": "a .npy file",
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_that_cannot_be(files, tmp_path, name):
    np.save(tmp_path / "split.npy", np.array([0, 1] * 5))
    np.save(tmp_path / "short.npy", np.ones(3, bool))
    np.save(tmp_path / "outside.npy", np.array([1, 10]))
    np.save(tmp_path / "none.npy", np.zeros(10, bool))
    np.save(tmp_path / "floats.npy", np.ones(10))
    (tmp_path / "mask.txt").write_text("1")
    with pytest.raises(LattqeError, match=SELECTIONS[name]):
        open_source(files, select=[f"{tmp_path}/{name}"])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"columns": 4}, "the vectors have 3"), ({"columns": 0}, "the vectors have 3"), ({"rows": "1-2"}, "write A:B"),
     ({"rows": "20:"}, "no row of 10")],
)  # fmt: skip
def test_options_that_cannot_be(files, options, words):
    with pytest.raises(LattqeError, match=words):
        open_source(files, **options)


SIDE_FILES = {
    "short.txt": ("a\nb\n", "holds 2 {what} for 10 rows"),
    "two.csv": ("number,name\n1,a\n", "has 2 columns and none is named"),
    "ragged.csv": ("id,label,x\n1,2,3\n1,2\n", "line 3 has 2 cells"),
    "binary.txt": (b"\xff\xfe\xfa\n" * 10, "not a readable text file"),
    "empty.txt": ("", "is empty"),
    "blank line.txt": ("a\n" * 5 + "\n" + "b\n" * 4, "row 5 is empty"),
    "ids.xml": ("<a/>", "read from .npy, .txt and .csv"),
}


@pytest.mark.parametrize("name", SIDE_FILES)
@pytest.mark.parametrize("what", ["ids", "labels"])
def test_side_files_that_cannot_be(files, tmp_path, name, what):
    content, words = SIDE_FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LattqeError, match=words.format(what=what)):
        open_source(files, **{what: tmp_path / name})


def test_ids_beyond_unicode(files, tmp_path):
    """Numpy keeps any number for a letter, and Python would even encode it."""
    ids = np.array([f"u{row}" for row in range(10)])
    ids.view(np.uint32).reshape(10, -1)[3, 0] = 0x200000
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(LattqeError, match="row 3 is not valid Unicode"):
        open_source(files, ids=tmp_path / "ids.npy")


@pytest.mark.parametrize(
    ("values", "words"),
    [(np.array([0.5] * 10), "float64"), (np.array([2**31] * 10), "row 0 is 2147483648, which does not fit"),
     (np.zeros((10, 2), int), "shape"), (np.array([None] * 10), "Python objects")],
)  # fmt: skip
def test_labels_that_cannot_be(files, tmp_path, values, words):
    np.save(tmp_path / "labels.npy", values, allow_pickle=True)
    with pytest.raises(LattqeError, match=words):
        open_source(files, labels=tmp_path / "labels.npy")


def test_columns_by_name_and_those_not_used(tmp_path):
    vectors = pa.array(X.tolist(), pa.list_(pa.float32()))
    names = [f"photo {row}" for row in range(len(X))]
    classes = [("bee", "ant")[row % 2] for row in range(len(X))]
    pq.write_table(pa.table({"filename": names, "vector": vectors, "class": classes}), tmp_path / "x.parquet")
    plain = open_source(tmp_path / "x.parquet")
    assert not plain.has_labels
    (note,) = plain.notes
    assert "not used: filename, class (--ids-key NAME takes ids" in note
    source = open_source(tmp_path / "x.parquet", ids_key="filename", labels_key="class")
    assert source.notes == []
    (block,) = source.blocks(100)
    assert block.ids == names
    assert [source.label_names[label] for label in block.labels] == classes
    with pytest.raises(LattqeError, match="has no column 'klass'; it has filename, vector, class"):
        open_source(tmp_path / "x.parquet", labels_key="klass")


@pytest.mark.parametrize("ending", [".h5", ".pkl", ".mat"])
def test_arrays_by_name(tmp_path, ending):
    path = tmp_path / f"x{ending}"
    numbers = np.arange(len(X)) % 3
    if ending == ".h5":
        with h5py.File(path, "w") as file:
            file["vectors"], file["meta/class"] = X, numbers
    elif ending == ".pkl":
        path.write_bytes(pickle.dumps({"vectors": X, "class": numbers.tolist()}))
    else:
        scipy.io.savemat(path, {"X": X.T, "class": numbers.astype(float)})
    source = open_source(path, labels_key="/meta/class" if ending == ".h5" else "class")
    (block,) = source.blocks(100)
    np.testing.assert_array_equal(block.labels, numbers)
    with pytest.raises(LattqeError, match="holds no column 'klass'"):
        open_source(path, labels_key="klass")


def test_files_without_names_take_none(files, tmp_path):
    with pytest.raises(LattqeError, match=r"holds one array: leave out --ids-key, or give a file with --ids"):
        open_source(files[0], ids_key="name")
    with pytest.raises(LattqeError, match=r"holds one array, and none is called 'X': leave out --key"):
        open_source(files[0], key="X")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({f"image {row}": x for row, x in enumerate(X)}))
    with pytest.raises(LattqeError, match=r"maps each image to its vector: leave out --labels-key"):
        open_source(tmp_path / "x.pkl", labels_key="class")


@pytest.mark.parametrize("code", [0x110000, 0x200041, 0x80000041, 0xFFFFFFFF])
@pytest.mark.parametrize("order", ["<", ">"])
def test_texts_beyond_unicode_are_refused(files, tmp_path, code, order):
    texts = np.full(len(X), ord("a"), dtype=f"{order}u4")
    texts[4] = code
    np.save(tmp_path / "labels.npy", texts.view(f"{order}U1"))
    with pytest.raises(LattqeError, match="row 4 is not valid Unicode"):
        open_source(files[0], labels=tmp_path / "labels.npy")


def test_a_negative_number_of_columns_is_refused(tmp_path):
    width, path = 7717, tmp_path / "x.arrow"
    table = pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array([0.5] * width, pa.float32()), width)})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    declared = np.array(width, "<i4").tobytes()
    assert declared in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(declared, np.array(-65536, "<i4").tobytes()))
    with pytest.raises(LattqeError, match="1 rows of -65536 columns: it is empty or damaged"):
        open_source(path)
