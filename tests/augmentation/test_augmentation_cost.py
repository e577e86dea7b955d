"""Growing an index costs what changes, counted in products and network rows; without Ray."""

import numpy as np
import pytest
import torch

from lattqe.augmentation.growth import join_features, kept_rows, plan_growth
from lattqe.augmentation.index import begin_index, build_index
from lattqe.augmentation.recipe import Augmentation, Recipe
from lattqe.expansion import create
from lattqe.expansion.rows import augment_rows
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search import knn_graph
from lattqe.search.index import StoredIndex
from lattqe.search.rows import Clock
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter

ROWS, DIM, K = 1_000, 8, 18


def write(uri, x, first=0):
    with FeatureWriter(str(uri), DIM, dtype="float32") as writer:
        writer.append(x, [f"r{first + i}" for i in range(len(x))])
    return FeatureSet.open(str(uri))


def index_of(features, graph, model, to):
    """Augment in this process: the index, and how many rows the network saw."""
    task = Augmentation(features.uri, graph.uri, str(to), "lattqe", K, {"model": model, "dba": True})
    pending = begin_index(task)
    expanded = build_index(task).expanded
    pending.finish()
    return FeatureSet.open(str(to)), expanded


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """1,000 rows, 20 that may join, a small network, and the index of the first."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    LAttQE(LAttQEConfig(dim=DIM, heads=1, layers=1, max_k=K, positional_start="small")).save(str(folder / "model"))
    x = np.random.default_rng(0).standard_normal((ROWS + 20, DIM)).astype(np.float32)
    features = write(folder / "features", x[:ROWS])
    graph = publish_graph(features, K, str(folder / "graph"))
    index, _ = index_of(features, graph, str(folder / "model"), folder / "index")
    return folder, x, index


@pytest.mark.parametrize(("new", "removed", "share"), [(2, 0, 0.05), (20, 0, 0.4), (1, 1, 0.05)])
def test_growth_costs_its_share_and_equals_from_scratch(world, tmp_path, new, removed, share):
    folder, x, index = world
    recipe = Recipe.of(index)
    kept = kept_rows(recipe.features, [f"r{i}" for i in range(0, 500 * removed, 500)])
    arrivals = write(tmp_path / "arrivals", x[ROWS : ROWS + new], ROWS) if new else None
    joined = join_features(recipe.features, kept, arrivals, str(tmp_path / "grown" / "originals"))
    task, graph, cost = plan_growth(index, recipe, joined, kept, str(tmp_path / "grown"))
    pending = begin_index(task)
    network_rows = build_index(task).expanded
    pending.finish()

    scratch_count = Clock()
    I, D = knn_graph(joined.read(), K, clock=scratch_count)
    np.testing.assert_array_equal(graph.read()[0], I)
    np.testing.assert_array_equal(graph.read()[1], D)
    assert network_rows == cost.touched
    assert 0.5 * share * joined.rows < cost.touched < 1.1 * share * joined.rows
    assert cost.products + cost.scored <= cost.products_allowed
    assert cost.products <= (new + cost.searched) * joined.rows
    assert scratch_count.counts["products"] >= cost.products_from_scratch

    # Every tenth row, and all that joined: whether touched or taken over.
    rows = np.r_[0 : joined.rows : 10, len(kept) : joined.rows]
    method = create("lattqe", model=str(folder / "model"), dba=True)
    expected = augment_rows(StoredIndex([joined]), rows, D[rows], I[rows], method, K).vectors
    np.testing.assert_allclose(FeatureSet.open(str(tmp_path / "grown")).gather(rows), expected, atol=1e-6)
