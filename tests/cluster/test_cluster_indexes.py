"""An index from beginning to end: its stages in order, and the same bytes by the verb and by the benchmark."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cluster.benchmark import Indexes
from cluster.indexes import IndexStage, Workplace, make_index
from lattqe.augmentation.recipe import Augmentation
from lattqe.benchmark.spec import Setting
from lattqe.search.rows import Clock
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph

ROWS, DIM, K, HOPS = 150, 16, 4, 3


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureSet:
    """Rows enough to adapt to."""
    uri = str(tmp_path_factory.mktemp("rows") / "features")
    with FeatureWriter(uri, DIM, "float32") as writer:
        x = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
        writer.append(x, [f"row-{i}" for i in range(ROWS)])
    return FeatureSet.open(uri)


class Told:
    """A follower that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.rows: list[int] = []

    @contextmanager
    def counted(self, name: str) -> Iterator[Callable[[int], None]]:
        self.stages.append(name)
        self.rows.append(0)

        def advance(rows: int) -> None:
            self.rows[-1] += rows

        yield advance
        self.stages.append(f"{name} done")

    def adapting(self, original: FeatureSet, to: str):
        return self.counted(f"adapting {original.rows} rows in {Path(to).name}")

    def building(self, stage: IndexStage):
        assert stage.here
        return self.counted("hops" if stage.task.hopping else "edges" if stage.task.only_edges else "rows")


def test_stages_come_in_order_and_a_second_run_makes_nothing(features: FeatureSet, tmp_path: Path) -> None:
    to = str(tmp_path / "index")
    task = Augmentation(features.uri, "", to, "aqewd", K, hops=HOPS, hop_alpha=0.5, adapt=True)
    made, told, clock = [], Told(), Clock()

    def graph_of(rows: FeatureSet) -> NeighborGraph:
        assert "adaptation" in rows.manifest.inputs
        told.stages.append("graph")
        return publish_graph(rows, K, f"{to}/neighbors")

    for _ in range(2):
        place = Workplace(here=True)
        made.append(
            make_index(
                task, FeatureSet.open(task.features), graph_of, place, adapting=True, follower=told, clock=clock
            ).stages
        )
    order = ["adapting 150 rows in index", "graph", "edges", "hops"]
    assert [name for name in told.stages if not name.endswith(" done")] == 2 * order
    assert told.rows == [ROWS, ROWS, ROWS * HOPS, ROWS, 0, 0], "what is there is not made again"
    assert set(clock.seconds) == {"adapt", "graph", "augment"}
    assert [[each.manifest.digest for each in stages] for stages in made[1:]] == [
        [each.manifest.digest for each in made[0]]
    ]
    assert [each.memory for each in made[0]] == [{}, {}], "of workers there were none"


@pytest.mark.parametrize("params", [{}, {"hops": HOPS, "hop_alpha": 0.5}, {"adapt": True, "hops": HOPS}])
def test_a_benchmark_makes_the_bytes_that_augment_makes(
    features: FeatureSet, tmp_path: Path, params: dict, call_lattqe: Callable[..., tuple[int, str, str]]
) -> None:
    words = ["--adapt"] if params.get("adapt") else []
    for name in ("hops", "hop_alpha"):
        words += [f"--{name.replace('_', '-')}", params[name]] if name in params else []
    asked = ["--method", "aqewd", "-k", K, *words, "--to", tmp_path / "index"]
    code, _, shown = call_lattqe("augment", features.uri, *asked)
    assert code == 0, shown
    notes: list[str] = []
    indexes = Indexes(str(tmp_path / "run"), None, None, {})
    indexes.tell = notes.append
    with indexes.augmented("key", [features], Setting("aqewd", K, tuple(sorted(params.items()))), K) as (_, rows):
        assert rows.digest == FeatureSet.open(str(tmp_path / "index")).digest
    assert any("graph of 150 rows" in note for note in notes)
    assert any("aqewd augments 150 of 150 rows" in note for note in notes)
    assert any(f"{HOPS} hops of aqewd 450 of 450 rows" in note for note in notes) == ("hops" in params)
    assert set(indexes.seconds("key") or {}) == {"graph", "augment"} | ({"adapt"} if params.get("adapt") else set())
    assert indexes.memory == {}
