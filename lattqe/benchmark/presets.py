"""Runs that need no file: the revisited benchmarks, the photographs, the synthetic landmarks."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lattqe.benchmark.spec import Dataset, Distractors, Method, Run
from lattqe.datasets import photos
from lattqe.datasets.revisited import save_gnd
from lattqe.datasets.synthetic import SyntheticSplit, SyntheticWorld
from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, FeatureWriter

PHOTO_COLUMNS = 128  # trains in minutes on two cores
Block = tuple[np.ndarray, list[str], np.ndarray | None]


def store(uri: str, blocks: Iterable[Block], dim: int, source: dict[str, object], labels: bool = True) -> str:
    """Write blocks of (vectors, ids, labels) as float32 features, unless they are there already; their address."""
    writer = FeatureWriter(uri, dim, "float32", labels=labels, config=source)
    if writer.finished is None:
        with writer:
            for vectors, ids, own in blocks:
                writer.append(vectors, ids, own if labels else None)
    return uri


def classic_methods(model: str | None, nqe: int | None, ndba: int | None, nqe_with_dba: int | None) -> list[Method]:
    """The four competitors, tuned on test as the paper did, and LAttQE as its training chose."""
    methods = [
        Method("aqe", "AQE", "test", (1, 2, 4, 6, 8, 12, 16, 24), (2, 4, 8), (1, 2, 4, 8)),
        Method("aqewd", "AQEwD", "test", (2, 4, 6, 8, 12, 16, 24, 32), (4, 8, 12), (2, 4, 8)),
        Method("dqe", "DQE", "test", (1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 4),
               {"C": (0.1,), "negatives": (5, 50)}),
        Method("alphaqe", "αQE", "test", (8, 10, 16, 24, 36, 48, 72), (10, 24, 36), (4, 10, 24),
               {"alpha": (1.0, 2.0, 3.0, 4.0)}),
    ]
    if model is not None:
        chosen = (nqe or 64, ndba or 48, nqe_with_dba or nqe or 64)
        methods.append(Method("lattqe", "LAttQE", "fixed", (chosen[0],), (chosen[1],), (chosen[2],),
                              {"model": (model,)}))
    return methods


def chosen_neighbors(model: str | None) -> tuple[int | None, int | None, int | None]:
    """The nQE, nDBA and nQE with DBA that training chose on validation and stored with the model."""
    if model is None:
        return None, None, None
    from lattqe.store import load_model

    chosen = load_model(model)[2].get("chosen", {})
    return chosen.get("nqe"), chosen.get("ndba"), chosen.get("nqe_with_dba")


def photos_run(data: Path | None, folder: str, model: str | None) -> Run:
    """Four sets of photographs, each also with the other three as distractors."""
    source = photos.photos_folder(data)
    datasets, distractors = [], []
    for name in photos.SETS:
        split = photos.load_photos(name, "test", source, columns=PHOTO_COLUMNS)
        origin: dict[str, object] = {"photos": name, "split": "test", "columns": PHOTO_COLUMNS}
        base = f"{folder}/features/{name}-test"
        store(f"{base}-database", [(split.xb, split.ids, split.labels)], PHOTO_COLUMNS, origin)
        store(f"{base}-queries", [(split.xq, split.query_ids, split.query_labels)], PHOTO_COLUMNS, origin)
        datasets.append(Dataset(name, f"{base}-database", f"{base}-queries"))
    for name in photos.SETS:
        rest = [FeatureSet.open(f"{folder}/features/{other}-test-database") for other in photos.SETS if other != name]
        blocks: list[Block] = [(each.read(), each.ids(), None) for each in rest]
        uri = store(f"{folder}/features/{name}-others", blocks, PHOTO_COLUMNS, {"photos": f"all but {name}"}, False)
        distractors.append(Distractors("others", uri, of=name))
    return Run("Photographs: birds, cars, groceries, objects", tuple(datasets),
               tuple(classic_methods(model, *chosen_neighbors(model))), tuple(distractors))


def store_synthetic(split: SyntheticSplit, folder: str) -> tuple[str, str | None]:
    """Write a synthetic split as features; addresses of its database and, where it has any, of its queries."""
    origin: dict[str, object] = {"synthetic": split.name, "seed": split.world.seed, "rows": split.rows}
    database = store(f"{folder}/features/{split.name}", split.blocks(), split.dim, origin)
    if not split.queries:
        return database, None
    queries = [(split.query_vectors, split.query_ids, split.query_labels)]
    return database, store(f"{folder}/features/{split.name}-queries", queries, split.dim, origin)


def synthetic_run(data: Path | None, folder: str, model: str | None, world: SyntheticWorld | None = None) -> Run:
    """Landmarks with few relevant images (like Oxford) and with many (like Paris), with and without distractors."""
    if data is not None:
        raise LattqeError("the synthetic preset makes its own data: leave --data out")
    world = world or SyntheticWorld()
    datasets = []
    for name in ("oxford", "paris"):
        split = world.split(name)
        database, queries = store_synthetic(split, folder)
        truth = Path(folder) / "features" / f"gnd_{name}.json"
        if not truth.exists():
            save_gnd(truth, split.revisited())
        datasets.append(Dataset(name, database, queries or "", str(truth)))
    more, _ = store_synthetic(world.split("distractors"), folder)
    return Run("Synthetic landmarks", tuple(datasets), tuple(classic_methods(model, *chosen_neighbors(model))),
               (Distractors("distractors", more),))


def revisited_run(data: Path | None, folder: str, model: str | None) -> Run:
    """Revisited Oxford and Paris with a million distractors, for whoever has the features.

    `data` holds roxford5k, roxford5k-queries, rparis6k, rparis6k-queries and (optionally) r1m as feature sets, and
    gnd_roxford5k.pkl and gnd_rparis6k.pkl as published.
    """
    if data is None:
        raise LattqeError("where are the features of roxford5k and rparis6k? Name their folder with --data")
    datasets = tuple(Dataset(name, str(data / name), str(data / f"{name}-queries"), str(data / f"gnd_{name}.pkl"))
                     for name in ("roxford5k", "rparis6k"))
    distractors = (Distractors("r1m", str(data / "r1m")),) if (data / "r1m").exists() else ()
    return Run("Revisited Oxford and Paris", datasets, tuple(classic_methods(model, *chosen_neighbors(model))),
               distractors, published=True)


PRESETS: dict[str, Callable[[Path | None, str, str | None], Run]] = {
    "revisited": revisited_run, "photos": photos_run, "synthetic": synthetic_run}


def preset_run(name: str, data: Path | None, folder: str, model: str | None) -> Run:
    """The run of a preset; data that it makes or cuts go to `folder`/features."""
    return PRESETS[name](data, folder.rstrip("/"), model)
