"""Joining feature sets, taking rows over, and finding an index's recipe again; without Ray."""

import numpy as np
import pytest

from lattqe.augmentation.growth import check_joinable, join_features, kept_rows, reusable_rows
from lattqe.augmentation.recipe import Recipe, describe, recompute
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion import create
from lattqe.expansion.rows import augment_rows
from lattqe.search import FlatIndex, knn_graph
from lattqe.search.graph import update_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, Pending, features_table, neighbors_table
from lattqe.store.features import IdRegister, Kept
from lattqe.store.place import traffic
from lattqe.store.writer import stack_features

DIM, K = 12, 5


def write_features(uri, x, first=0, labels=True, part_bytes=1 << 20):
    ids = [f"id-{first + i}" for i in range(len(x))]
    with FeatureWriter(str(uri), x.shape[1], labels=labels, part_bytes=part_bytes) as writer:
        writer.append(x, ids, np.arange(len(x)) % 7 if labels else None)
    return FeatureSet.open(str(uri))


def write_graph(uri, features, k=K):
    I, D = knn_graph(features.read(), k)
    pending = Pending.begin(str(uri), "neighbors", {"k": k}, [features.rows], inputs={"features": features.as_input()})
    pending.publish(0, neighbors_table(I, D))
    pending.finish()
    return NeighborGraph.open(str(uri))


def write_index(uri, features, graph, method="alphaqe", spoil=None, **params):
    I, D = graph.read()
    index = FlatIndex(features.read())
    vectors = augment_rows(index, np.arange(features.rows), D, I, create(method, **params), K).vectors
    vectors = vectors.astype(features.dtype)
    if spoil is not None:
        vectors[spoil] = vectors[spoil - 1]
    pending = Pending.begin(
        str(uri),
        "features",
        {"dim": DIM, "dtype": features.dtype},
        [features.rows],
        config=describe(method, K, params),
        schema=features.table(0, 1).schema,
        inputs={"features": features.as_input(), "neighbors": graph.as_input()},
    )
    pending.publish(0, features_table(features.ids(), vectors, features.labels()))
    pending.finish()
    return FeatureSet.open(str(uri))


def vectors(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)


def test_grown_index_equals_from_scratch(tmp_path):
    old = write_features(tmp_path / "old", vectors(300))
    new = write_features(tmp_path / "new", vectors(12, seed=1), first=300)
    graph = write_graph(tmp_path / "graph", old)
    kept = kept_rows(old, ["id-3", "id-77"])
    joined = join_features(old, kept, new, str(tmp_path / "joined"))
    assert joined.ids() == [i for i in old.ids() if i not in ("id-3", "id-77")] + new.ids()
    np.testing.assert_array_equal(joined.read(), np.concatenate([old.read()[kept.old()], new.read()]))

    I, D = graph.gather(kept.old())
    I = kept.new(I)
    updated = update_graph(joined.read(), I, D, stale=(I < -1).any(axis=1))
    scratch = write_graph(tmp_path / "scratch", joined)
    np.testing.assert_array_equal(updated[0], scratch.read()[0])

    reusable = reusable_rows(I, scratch.read()[0], kept.old())
    before = write_index(tmp_path / "before", old, graph, alpha=3.0)
    after = write_index(tmp_path / "after", joined, scratch, alpha=3.0)
    same = reusable >= 0
    assert 0.3 < same.mean() < 1, "12 newcomers touch some rows, not all"
    assert not same[-12:].any()
    np.testing.assert_array_equal(after.read()[same], before.read()[reusable[same]])


@pytest.mark.parametrize("removed", [[], [0], [3, 4, 5, 9], [0, 1, 2, 7, 8, 9], list(range(9))])
def test_rows_that_stay_are_numbered_by_those_that_leave(removed):
    kept, stays = Kept(10, np.array(removed, np.int64)), np.setdiff1d(np.arange(10), removed)
    np.testing.assert_array_equal(kept.old(), stays)
    np.testing.assert_array_equal(kept.old(1, len(stays)), stays[1:])
    number = {int(row): place for place, row in enumerate(stays)}
    lists = np.array([[-1, 0, 9], [5, 3, -1], [8, 4, 6]], np.int32)
    expected = [[-1 if row < 0 else number.get(row, Kept.LEFT) for row in line] for line in lists.tolist()]
    np.testing.assert_array_equal(kept.new(lists), expected)
    assert (len(kept), kept.new(lists).dtype) == (len(stays), np.int32)


def test_joining_twice_is_the_same_set_and_other_removals_are_refused(tmp_path):
    old = write_features(tmp_path / "old", vectors(20))
    first = join_features(old, kept_rows(old, ["id-1"]), None, str(tmp_path / "joined"))
    assert join_features(old, kept_rows(old, ["id-1"]), None, str(tmp_path / "joined")).digest == first.digest
    with pytest.raises(LattqeError, match="differs"):
        join_features(old, kept_rows(old, ["id-2"]), None, str(tmp_path / "joined"))


PART = 8000  # bytes: about 220 rows


def grown(base, removed=()):
    """A set of many parts, what joins it, the rows that stay, and the destination."""
    old = write_features(f"{base}/old", vectors(1500), part_bytes=PART)
    new = write_features(f"{base}/new", vectors(60, seed=1), first=1500)
    return old, new, kept_rows(old, [f"id-{row}" for row in removed]), f"{base}/joined"


def check_joined(joined, old, kept, new):
    """The rows of both sets in their order, and a sound set."""
    joined.verify()
    stays = kept.old()
    np.testing.assert_array_equal(joined.read(), np.concatenate([old.read()[stays], new.read()]))
    np.testing.assert_array_equal(joined.labels(), np.concatenate([old.labels()[stays], new.labels()]))
    assert joined.ids() == old.gather_ids(stays) + new.ids()


@pytest.mark.parametrize("removed", [[], [0], [300, 301, 900], [*range(100, 800)], [1499]])
def test_parts_that_stay_whole_are_linked_and_no_id_becomes_an_object(tmp_path, monkeypatch, removed):
    old, new, kept, to = grown(tmp_path, removed)
    monkeypatch.setattr(IdRegister, "add", None)
    before = traffic.totals()["written"]
    joined = join_features(old, kept, new, to, PART)
    written = traffic.totals()["written"] - before
    monkeypatch.undo()
    check_joined(joined, old, kept, new)
    starts = old.parts.starts
    touched = {int(np.searchsorted(starts, row, side="right")) - 1 for row in removed}
    whole = [number for number in range(len(old.manifest.parts) - 1) if number not in touched]
    there = {part.checksum: part.name for part in joined.manifest.parts}
    for number in whole:
        part = old.manifest.parts[number]
        assert (tmp_path / "old" / part.name).samefile(tmp_path / "joined" / there[part.checksum])
    linked = sum(old.manifest.parts[number].bytes for number in whole)
    assert linked > old.manifest.total_bytes / 3
    assert written < joined.manifest.total_bytes - linked + 6000, "what is not linked, the claim and the manifest"


def test_a_join_that_was_killed_goes_on_and_replaces_what_was_damaged(tmp_path, monkeypatch):
    old, new, kept, to = grown(tmp_path, [70])
    expected = join_features(old, kept, new, f"{tmp_path}/once", PART)

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(FeatureWriter, "close", killed)
    with pytest.raises(KeyboardInterrupt):
        join_features(old, kept, new, to, PART)
    monkeypatch.undo()
    there = tmp_path / "joined" / "part-00001.arrow"
    there.unlink()
    there.write_bytes(b"damaged")
    with pytest.raises(LattqeError, match="not finished"):
        FeatureSet.open(to)
    joined = join_features(old, kept, new, to, PART)
    assert joined.digest == expected.digest
    check_joined(joined, old, kept, new)


def test_many_small_growths_do_not_leave_a_part_each(tmp_path):
    joined = write_features(tmp_path / "old", vectors(600), part_bytes=PART)
    for step in range(12):
        new = write_features(tmp_path / f"new{step}", vectors(50, seed=1 + step), first=1000 * (1 + step))
        joined = join_features(joined, kept_rows(joined, []), new, str(tmp_path / f"joined{step}"), PART)
    joined.verify()
    assert joined.rows == 1200
    assert len(joined.manifest.parts) <= 3 + 12 // 2, "two growths fill half a part, and then it stays"


def test_s3_copies_whole_parts_itself(tmp_path, s3_uri):
    old, new, kept, to = grown(s3_uri, [70])
    before = traffic.totals()
    joined = join_features(old, kept, new, to, PART)
    counted = {name: total - before.get(name, 0) for name, total in traffic.totals().items()}
    check_joined(joined, old, kept, new)
    assert counted["CopyObject"] == len(old.manifest.parts) - 2, "but for the one that lost a row and a small last one"
    again = join_features(old, kept, new, str(tmp_path / "here"), PART)
    assert again.digest == joined.digest, "from one kind of storage to the other the bytes go through this process"


def test_an_id_that_is_there_is_refused_unless_its_row_leaves(tmp_path):
    old = write_features(tmp_path / "old", vectors(60), part_bytes=PART)
    again = write_features(tmp_path / "again", vectors(3, 3), first=59)
    with pytest.raises(LattqeError, match=r"1 ids of .*again are in .*old already, the first is 'id-59'"):
        join_features(old, kept_rows(old, ["id-1"]), again, str(tmp_path / "joined"))
    assert not (tmp_path / "joined").exists()
    joined = join_features(old, kept_rows(old, ["id-59"]), again, str(tmp_path / "joined"))
    assert joined.ids()[58:] == ["id-58", "id-59", "id-60", "id-61"]
    pending = Pending.begin(str(tmp_path / "twice"), "features", {"dim": DIM, "dtype": "float16", "labels": True}, [2])
    x = np.eye(2, DIM, dtype=np.float16)
    pending.publish(0, features_table(["same", "same"], x, np.zeros(2, np.int32)))
    pending.finish()
    twice = FeatureSet.open(str(tmp_path / "twice"))
    with pytest.raises(LattqeError, match="twice in it, the first is 'same'"):
        join_features(old, kept_rows(old, []), twice, str(tmp_path / "other"))


def test_stacked_sets_keep_their_values_whatever_columns_they_have(tmp_path):
    one = write_features(tmp_path / "one", vectors(7))
    two = write_features(tmp_path / "two", vectors(5, seed=1), first=7, labels=False)
    stacked = stack_features([one, two], str(tmp_path / "stacked"))
    np.testing.assert_array_equal(stacked.read(), np.concatenate([one.read(), two.read()]))
    assert stacked.ids() == one.ids() + two.ids()
    assert not stacked.has_labels
    assert stack_features([one, two], str(tmp_path / "stacked")).digest == stacked.digest


def test_what_cannot_be_joined_is_refused(tmp_path):
    old = write_features(tmp_path / "old", vectors(5))
    with pytest.raises(LattqeError, match="'id-9'"):
        kept_rows(old, ["id-9"])
    with pytest.raises(LattqeError, match="nothing would be left"):
        kept_rows(old, old.ids())
    with pytest.raises(LattqeError, match="dim 3"):
        check_joinable(old, write_features(tmp_path / "narrow", np.eye(3, dtype=np.float32)))
    with pytest.raises(LattqeError, match="columns"):
        check_joinable(old, write_features(tmp_path / "unlabelled", vectors(5), labels=False))
    with pytest.raises(LattqeError, match="id-4"):
        join_features(
            old,
            kept_rows(old, []),
            write_features(tmp_path / "again", vectors(2, 3), first=4),
            str(tmp_path / "joined"),
        )


def test_recompute_accepts_its_own_and_names_a_wrong_row(tmp_path):
    features = write_features(tmp_path / "features", vectors(200))
    graph = write_graph(tmp_path / "graph", features)
    assert recompute(write_index(tmp_path / "index", features, graph), 200) < 1e-3
    with pytest.raises(CorruptDataError, match="row 40 "):
        recompute(write_index(tmp_path / "spoilt", features, graph, spoil=40), 200)
    with pytest.raises(LattqeError, match="was not made by"):
        recompute(features, 5)


def test_inputs_move_with_the_index_or_are_missed_by_name(tmp_path):
    features = write_features(tmp_path / "features", vectors(50))
    graph = write_graph(tmp_path / "graph", features)
    index = write_index(tmp_path / "index", features, graph)
    (tmp_path / "graph").rename(tmp_path / "index" / "neighbors")
    assert Recipe.of(index).graph.uri.endswith("index/neighbors")
    (tmp_path / "features").rename(tmp_path / "elsewhere")
    with pytest.raises(LattqeError, match=r"the features that made .* could not be found"):
        Recipe.of(index)


@pytest.mark.parametrize(
    ("name", "value"), [("method", {}), ("k", []), ("k", True), ("params", "x"), ("hops", "two"), ("hops", 2)]
)
def test_a_forged_recipe_is_refused_in_one_line(tmp_path, name, value):
    """A checksum shows that nothing is damaged, not that an augmentation wrote it."""
    features = write_features(tmp_path / "features", vectors(40))
    index = write_index(tmp_path / "index", features, write_graph(tmp_path / "graph", features))
    index.manifest.config[name] = value
    with pytest.raises(CorruptDataError, match="the manifest of .*index names (hop_alpha None|" + name + ")"):
        Recipe.of(index)
