"""Sharded search equals unsharded search, row number for row number, through deaths of actors."""

import os
import signal

import numpy as np
import pytest
import ray

from cluster.session import ray_session
from cluster.shards import Shard, ShardedIndex, ShardPolicy, cut_ranges, shard_resources
from lattqe.errors import LattqeError
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def seven_cpus():
    ray.shutdown()
    with ray_session(cpus=7):  # more than the machine may have: what is asked for is only counted
        yield


def write(path, x, dtype="float16"):
    with FeatureWriter(str(path), x.shape[1], dtype=dtype, part_bytes=20_000) as writer:
        writer.append(x, [f"{path.name}-{i}" for i in range(len(x))])
    return FeatureSet.open(str(path))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Random rows, one vector two thousand times, and a few vectors many times each, shuffled; and queries."""
    rng = np.random.default_rng(0)
    distinct = rng.standard_normal((1000, 24))
    x = np.concatenate([distinct, np.repeat(distinct[:1], 2000, axis=0), distinct[rng.integers(1, 9, 500)]])
    folder = tmp_path_factory.mktemp("crowded")
    queries = np.concatenate([distinct[:4], rng.standard_normal((40, 24))]).astype(np.float32)
    return write(folder / "rows", x[rng.permutation(len(x))]), queries


@pytest.fixture(scope="module")
def photos(tmp_path_factory, photos_folder):
    """Real photographs: a database, and another set as its distractors."""
    folder = tmp_path_factory.mktemp("photos")
    sets = [np.load(photos_folder / f"{name}_vectors.npy")[:2500, :128] for name in ("grocery81", "caltech101")]
    return [write(folder / f"set{number}", vectors) for number, vectors in enumerate(sets)]


@pytest.mark.parametrize("shards", [1, 3])
def test_any_number_of_shards_gives_the_same_rows(crowded, shards):
    features, xq = crowded
    flat = FlatIndex(features.read())
    rng = np.random.default_rng(1)
    rows = rng.integers(-1, features.rows, (len(xq), 6))
    with ShardedIndex(features.uri, shards, query_block=17) as index:
        assert (index.shards, index.rows, index.dim) == (shards, features.rows, 24)
        for k in (1, 50):
            for ours, theirs in zip(index.search(xq, k), flat.search(xq, k)):
                np.testing.assert_array_equal(ours, theirs)
            for ours, theirs in zip(index.lowest(xq, k), flat.lowest(xq, k)):
                np.testing.assert_array_equal(ours, theirs)
        scores = index.score(xq, rows)
        np.testing.assert_array_equal(scores, flat.score(xq, rows))
        np.testing.assert_array_equal(index.count_above(xq, scores, rows), flat.count_above(xq, scores, rows))
        some = rng.integers(0, features.rows, 100)
        np.testing.assert_array_equal(index.gather(some), features.gather(some).astype(np.float32))


@pytest.mark.parametrize("shards", [3])
def test_distractors_follow_the_database(photos, shards):
    database, distractors = photos
    joined = np.concatenate([database.read(), distractors.read()])
    xq = joined[::211].astype(np.float32)
    expected = FlatIndex(joined).search(xq, 100)
    with ShardedIndex([database.uri, distractors.uri], shards) as index:
        scores, ids = index.search(xq, 100)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(scores, expected[0])
    assert (ids >= database.rows).any(), "some answers are distractors, or this shows nothing"


def test_pieces_cover_all_rows_once():
    pieces = [piece for cut in ((0, 3), (3, 9), (9, 12)) for piece in cut_ranges([("a", 5), ("b", 1), ("c", 6)], *cut)]
    assert [(piece.uri, piece.start, piece.stop) for piece in pieces] == [
        ("a", 0, 3),
        ("a", 3, 5),
        ("b", 0, 1),
        ("c", 0, 3),
        ("c", 3, 6),
    ]


def mortal_shard():
    """A class that Ray sends to its workers whole, because it is not in an importable module."""

    class MortalShard(Shard):
        """Kills its process in its second search, as often as there are files to remove."""

        calls = 0

        def search(self, xq, k):
            self.calls += 1
            lives = sorted(os.listdir(self.lives))
            if self.calls == 2 and self.index.first_row == 0 and lives:
                os.remove(os.path.join(self.lives, lives[0]))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().search(xq, k)

    return MortalShard


@pytest.mark.parametrize(("deaths", "allowed"), [(2, 3), (1, 0)])
def test_a_shard_that_dies_is_rebuilt_and_asked_again(crowded, tmp_path, monkeypatch, deaths, allowed):
    features, xq = crowded
    copy = write(tmp_path / "rows", features.read())
    lives = tmp_path / "lives"
    lives.mkdir()
    for life in range(deaths):
        (lives / str(life)).touch()
    mortal = mortal_shard()
    mortal.lives = str(lives)
    monkeypatch.setattr("cluster.shards.Shard", mortal)
    with ShardedIndex(copy.uri, 2, query_block=11, policy=ShardPolicy(max_failures=allowed)) as index:
        if deaths > allowed:
            with pytest.raises(LattqeError, match=r"shard 0 \(rows 0\.\.1750\) died 1 times"):
                index.search(xq, 10)
            return
        _, ids = index.search(xq, 10)
        assert index.failures == deaths
    assert not list(lives.iterdir()), "the shard died as often as planned"
    np.testing.assert_array_equal(ids, FlatIndex(features.read()).search(xq, 10)[1])


def test_missing_resources_are_named_in_time(crowded):
    with pytest.raises(LattqeError, match=r"40 shards need 40 CPU \(the cluster has 7, .*not granted within 1 s"):
        ShardedIndex(crowded[0].uri, 40, policy=ShardPolicy(start_timeout=1))
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] == "PENDING"]


@pytest.mark.parametrize(
    ("cpus", "shards", "each"), [((8, 8, 8), 4, 4), ((8, 8, 8), 3, 8), ((16, 2), 3, 5), ((0, 2, 2), 4, 1), ((2,), 5, 1)]
)
def test_shards_take_as_many_cpus_as_leave_room_for_all(monkeypatch, cpus, shards, each):
    """Four shards on three nodes of 8 CPUs: a share of all would be 6, which only three of them could get."""
    nodes = [{"Alive": True, "Resources": {"CPU": float(owned)}} for owned in cpus]
    monkeypatch.setattr("cluster.shards.ray.nodes", lambda: nodes)
    assert shard_resources(shards) == {"CPU": each}
    assert shard_resources(shards, cpus=1) == {"CPU": 1}


def test_rows_that_cannot_fit_are_refused(crowded, monkeypatch):
    node = {"Alive": True, "Resources": {"CPU": 7, "memory": 1e5}}
    monkeypatch.setattr("cluster.shards.ray.nodes", lambda: [node])
    with pytest.raises(LattqeError, match="2 shards of 0 MiB do not fit the cluster's 0 MiB: add nodes"):
        ShardedIndex(crowded[0].uri, 2)


def test_wrong_input_reaches_the_caller_as_one_line(crowded, tmp_path):
    other = write(tmp_path / "other", np.eye(12))
    with pytest.raises(LattqeError, match="12 dimensions"):
        ShardedIndex([crowded[0].uri, other.uri], 2)
    with ShardedIndex(crowded[0].uri, 2) as index:
        with pytest.raises(LattqeError, match="queries have 12 dimensions"):
            index.search(np.eye(12, dtype=np.float32), 3)
        with pytest.raises(LattqeError, match="row 3500 requested"):
            index.gather(np.array([3500]))
    part = next(path for path in (tmp_path / "other").glob("part-*"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(LattqeError, match=r"part-00000\.arrow does not match its checksum"):
        ShardedIndex(other.uri, 1)
