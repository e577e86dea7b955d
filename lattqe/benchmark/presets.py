"""Runs that need no file: the revisited benchmarks, the photographs, the synthetic landmarks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lattqe.benchmark.models import as_trained
from lattqe.benchmark.spec import Dataset, Distractors, Method, Run
from lattqe.datasets import photos
from lattqe.datasets.revisited import save_gnd
from lattqe.datasets.synthetic import SyntheticSplit, SyntheticWorld
from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, FeatureWriter

PRESETS = ("revisited", "photos", "synthetic")
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


def competitors() -> list[Method]:
    """The paper's four competitors with grids to be tuned on test, as the paper did."""
    return [
        Method("aqe", "AQE", "test", (1, 2, 4, 6, 8, 12, 16), (2, 4, 8), (2, 4, 8)),
        Method("aqewd", "AQEwD", "test", (2, 4, 6, 8, 10, 12, 16, 24), (4, 8, 12), (4, 8, 12)),
        Method("dqe", "DQE", "test", (2, 4, 8, 12), (2, 4, 8), (2, 4, 8), {"C": (0.1, 1.0), "negatives": (5, 50)}),
        Method("alphaqe", "αQE", "test", (8, 10, 16, 24, 36, 48, 72), (10, 24, 36), (4, 10, 24),
               {"alpha": (1.0, 2.0, 3.0, 4.0)}),
    ]


def photo_competitors() -> list[Method]:
    """The same for classes of fifty and more images: augmentation is worth more neighbors there."""
    depths = {"aqe": ((4, 8, 12), (2, 4, 8)), "aqewd": ((8, 12, 16, 24, 36), (8, 12, 16, 24)),
              "dqe": ((4, 8, 12), (4, 8, 12)), "alphaqe": ((8, 16, 24, 36), (8, 16, 24))}
    return [replace(one, ndba=depths[one.method][0], nqe_with_dba=depths[one.method][1]) for one in competitors()]


def all_methods(model: str | None, others: Sequence[Method]) -> tuple[Method, ...]:
    """The competitors and, where there is a model, LAttQE with the numbers its training chose."""
    return (*others, *([as_trained(model)] if model is not None else []))


def photos_run(data: Path | None, folder: str, model: str | None, columns: int = PHOTO_COLUMNS) -> Run:
    """Four sets of photographs, each also with the other three as distractors; the first `columns` of the vectors."""
    source = photos.photos_folder(data / "photos" if data is not None and (data / "photos").is_dir() else data)
    prefix = f"{folder}/features/{columns}"
    datasets, distractors = [], []
    for name in photos.SETS:
        split = photos.load_photos(name, "test", source, columns=columns)
        origin: dict[str, object] = {"photos": name, "split": "test", "columns": columns}
        database = store(f"{prefix}/{name}", [(split.xb, split.ids, split.labels)], columns, origin)
        asked: list[Block] = [(split.xq, split.query_ids, split.query_labels)]
        datasets.append(Dataset(name, database, store(f"{prefix}/{name}-queries", asked, columns, origin)))
    for name in photos.SETS:
        rest = [FeatureSet.open(f"{prefix}/{other}") for other in photos.SETS if other != name]
        blocks: list[Block] = [(each.read(), each.ids(), None) for each in rest]
        others: dict[str, object] = {"photos": f"all but {name}", "columns": columns}
        uri = store(f"{prefix}/{name}-others", blocks, columns, others, labels=False)
        distractors.append(Distractors("others", uri, of=name))
    return Run("Photographs: birds, cars, groceries, objects", tuple(datasets),
               all_methods(model, photo_competitors()), tuple(distractors))


def store_synthetic(split: SyntheticSplit, folder: str) -> tuple[str, str]:
    """Write a synthetic split as features; addresses of its database and of its queries ('' where it has none)."""
    world = split.world
    origin: dict[str, object] = {"synthetic": split.name, "seed": world.seed, "scale": world.scale, "rows": split.rows}
    database = store(f"{folder}/features/{split.name}", split.blocks(), split.dim, origin)
    if not split.queries:
        return database, ""
    queries: list[Block] = [(split.query_vectors, split.query_ids, split.query_labels)]
    return database, store(f"{folder}/features/{split.name}-queries", queries, split.dim, origin)


def synthetic_run(folder: str, methods: tuple[Method, ...], world: SyntheticWorld | None = None) -> Run:
    """Landmarks with few relevant images (like Oxford) and with many (like Paris), with and without distractors."""
    world = world or SyntheticWorld()
    datasets = []
    for name in ("oxford", "paris"):
        split = world.split(name)
        database, queries = store_synthetic(split, folder)
        truth = Path(folder) / "features" / f"gnd_{name}.json"
        if not truth.exists():
            save_gnd(truth, split.revisited())
        datasets.append(Dataset(name, database, queries, str(truth)))
    more, _ = store_synthetic(world.split("distractors"), folder)
    return Run("Synthetic landmarks", tuple(datasets), methods, (Distractors("distractors", more),))


def revisited_run(data: Path | None, model: str | None) -> Run:
    """Revisited Oxford and Paris with a million distractors, for whoever has the features.

    `data` holds roxford5k, roxford5k-queries, rparis6k, rparis6k-queries and (optionally) r1m as feature sets, and
    gnd_roxford5k.pkl and gnd_rparis6k.pkl as published.
    """
    if data is None:
        raise LattqeError("where are the features of roxford5k and rparis6k? Name their folder with --data")
    datasets = tuple(Dataset(name, str(data / name), str(data / f"{name}-queries"), str(data / f"gnd_{name}.pkl"))
                     for name in ("roxford5k", "rparis6k"))
    distractors = (Distractors("r1m", str(data / "r1m")),) if (data / "r1m").exists() else ()
    return Run("Revisited Oxford and Paris", datasets, all_methods(model, competitors()), distractors,
               published=True)


def preset_run(name: str, data: Path | None, folder: str, model: str | None, columns: int | None = None) -> Run:
    """The run of a preset; data that it makes or cuts go to `folder`/features."""
    folder = folder.rstrip("/")
    if columns is not None and name != "photos":
        raise LattqeError("--columns belongs to the photos preset: other features are used whole")
    if name == "photos":
        return photos_run(data, folder, model, columns or PHOTO_COLUMNS)
    if name == "revisited":
        return revisited_run(data, model)
    if data is not None:
        raise LattqeError("the synthetic preset makes its own data: leave --data out")
    return synthetic_run(folder, all_methods(model, competitors()))
