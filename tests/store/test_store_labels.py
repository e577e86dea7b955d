"""Labels with names: every set numbers its own texts, so whatever compares labels of two sets does so by name."""

import numpy as np
import pytest

from lattqe.augmentation.growth import check_joinable, join_features, kept_rows
from lattqe.benchmark.cells import OpenedDataset
from lattqe.benchmark.spec import Dataset
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import FeatureSet, FeatureWriter, comparable_labels
from lattqe.store.artifacts import verify_artifact
from lattqe.training.plan import check_apart, load
from lattqe.training.validation import load_set

CLASSES = ["ant", "bee", "cat", "dog", "emu"]


def write(uri, texts, named=True, first=0) -> FeatureSet:
    """A set whose labels are texts, numbered as the import does, or the numbers of CLASSES."""
    names = sorted(set(texts))
    x = np.random.default_rng(first).standard_normal((len(texts), 8)) + 3 * np.eye(8)[[CLASSES.index(t) for t in texts]]
    numbers = np.array([(names if named else CLASSES).index(text) for text in texts], np.int32)
    with FeatureWriter(str(uri), 8, labels=True, label_names=names if named else None) as writer:
        writer.append(x, [f"id-{first + row}" for row in range(len(texts))], numbers)
    return FeatureSet.open(str(uri))


def texts_of(features):
    return [features.label_names[label] for label in features.labels()]


def test_names_decide_not_numbers(tmp_path):
    a = write(tmp_path / "a", ["bee", "cat", "cat", "dog"])
    b = write(tmp_path / "b", ["cat", "ant", "dog"], first=10)
    assert a.labels().tolist() == [0, 1, 1, 2]
    assert b.labels().tolist() == [1, 0, 2]
    x, y = comparable_labels(a, b)
    assert x.tolist() == [0, 1, 1, 2]  # the first keeps its numbers
    assert y.tolist() == [1, 3, 2]
    assert x.dtype == y.dtype == np.int32


def test_numbers_stay_and_are_not_compared_with_names(tmp_path):
    plain = write(tmp_path / "plain", ["dog", "emu"], named=False)
    other = write(tmp_path / "other", ["emu", "ant"], named=False, first=10)
    assert [labels.tolist() for labels in comparable_labels(plain, other)] == [[3, 4], [4, 0]]
    named = write(tmp_path / "named", ["emu", "ant"], first=20)
    for pair in ((plain, named), (named, plain)):
        with pytest.raises(LattqeError, match=r"labels of .*named are text and those of .*plain are numbers"):
            comparable_labels(*pair)


def test_joined_sets_keep_the_names(tmp_path):
    old = write(tmp_path / "old", ["bee", "cat", "cat", "dog"])
    new = write(tmp_path / "new", ["ant", "dog", "cat"], first=10)
    check_joinable(old, new)
    joined = join_features(old, kept_rows(old, ["id-1"]), new, str(tmp_path / "joined"))
    assert texts_of(joined) == ["bee", "cat", "dog", "ant", "dog", "cat"]
    assert joined.labels()[:3].tolist() == [0, 1, 2]
    verify_artifact(joined.uri)
    alone = join_features(old, kept_rows(old, ["id-0"]), None, str(tmp_path / "alone"))
    assert texts_of(alone) == ["cat", "cat", "dog"]
    with pytest.raises(LattqeError, match="are text and those of"):
        check_joinable(old, write(tmp_path / "plain", ["dog"], named=False, first=20))


def test_a_benchmark_gives_the_same_for_names_and_numbers(tmp_path):
    """Queries that lack some classes of the database get other numbers for their texts."""
    rows = [CLASSES[i % 5] for i in range(50)]
    asked = ["dog", "emu", "cat", "emu"]
    counts = {}
    for named in (True, False):
        database = write(tmp_path / f"database-{named}", rows, named)
        queries = write(tmp_path / f"queries-{named}", asked, named, first=100)
        truth = OpenedDataset.open(Dataset("set", database.uri, queries.uri, "labels")).truth
        counts[named] = [truth.judgements(0, 4).rows.tolist(), truth.counts.tolist()]
        validation = load_set(database.uri, queries.uri)
        assert [rows[i] for i in np.flatnonzero(validation.labels == validation.query_labels[0])] == ["dog"] * 10
    assert counts[True] == counts[False]
    with pytest.raises(LattqeError, match="are text and those of"):
        OpenedDataset.open(Dataset("set", str(tmp_path / "database-True"), str(tmp_path / "queries-False"), "labels"))


def test_training_joins_and_separates_by_name(tmp_path):
    a = write(tmp_path / "a", ["bee", "bee", "cat", "cat"])
    b = write(tmp_path / "b", ["cat", "dog", "dog"], first=10)
    shared = load([a.uri, b.uri], [], None, shared_labels=True)
    assert shared.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    with pytest.raises(LattqeError, match=r"1 classes .*'cat' for one"):
        check_apart(a, b, shared_labels=False)
    check_apart(a, write(tmp_path / "apart", ["dog", "emu"], first=20), shared_labels=False)


def test_validation_images_are_training_images_only_if_the_vectors_agree_too(tmp_path):
    """Ids that are mere numbers occur in every set."""
    trained = write(tmp_path / "trained", ["bee", "cat"])
    check_apart(trained, write(tmp_path / "numbered-alike", ["dog", "emu"]), shared_labels=False)
    with FeatureWriter(str(tmp_path / "copied"), 8, labels=True, label_names=["dog"]) as writer:
        writer.append(trained.read(), trained.ids(), np.zeros(2, np.int32))
    with pytest.raises(LattqeError, match=r"2 images of .*copied are also in .*'id-0'"):
        check_apart(trained, FeatureSet.open(str(tmp_path / "copied")), shared_labels=False)


def test_labels_without_a_name_are_found(tmp_path):
    with FeatureWriter(str(tmp_path / "set"), 4, labels=True, label_names=["a", "b"]) as writer:
        writer.append(np.eye(4), list("wxyz"), np.array([0, 1, 2, 0]))
    with pytest.raises(CorruptDataError, match="row 2 has label 2, and there are 2 label names"):
        verify_artifact(str(tmp_path / "set"))
    broken = FeatureSet.open(str(tmp_path / "set"))
    with pytest.raises(CorruptDataError, match="label 2 has no name"):
        comparable_labels(broken, broken)


def test_names_of_several_lines_are_not_written(tmp_path):
    with pytest.raises(LattqeError, match=r"the label 'b\\nc' has several lines: give each label one line"):
        FeatureWriter(str(tmp_path / "set"), 4, labels=True, label_names=["a", "b\nc"])
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("names", ["ab", [1, 2], ["a", "a"], ["a", "b\nc"], ["a", "b\r"]])
def test_names_that_cannot_be(tmp_path, names):
    """As only an edited manifest has them."""
    writer = FeatureWriter(str(tmp_path / "set"), 4, labels=True, config={"label_names": names})
    writer.append(np.eye(4), list("wxyz"), np.array([0, 1, 1, 0]))
    with pytest.raises(CorruptDataError, match=r"not a list of distinct strings|holds a line break"):
        writer.close()


@pytest.mark.parametrize("hops", [1, 2])
def test_an_augmented_index_and_what_grows_from_it_keep_the_names(tmp_path, call_lattqe, hops):
    """Else its ranks could not be judged: its queries' labels have names."""
    texts = ["bee", "cat", "cat", "dog", "dog", "bee"]
    write(tmp_path / "database", texts)
    write(tmp_path / "queries", ["dog", "cat"], first=10)
    write(tmp_path / "new", ["ant", "dog"], first=20)
    method = ["--method", "aqe", "-k", 2, "--hops", hops]
    assert call_lattqe("augment", tmp_path / "database", *method, "--to", tmp_path / "index")[0] == 0
    assert call_lattqe("append", tmp_path / "index", tmp_path / "new", "--to", tmp_path / "grown")[0] == 0
    assert texts_of(FeatureSet.open(str(tmp_path / "index"))) == texts
    assert texts_of(FeatureSet.open(str(tmp_path / "grown"))) == [*texts, "ant", "dog"]
    assert '"label": "bee"' in call_lattqe("info", tmp_path / "index")[1]
    words = [tmp_path / "grown", tmp_path / "queries", "-k", 5, "--to", tmp_path / "ranks"]
    assert call_lattqe("search", *words)[0] == 0
    assert call_lattqe("evaluate", tmp_path / "ranks")[0] == 0
