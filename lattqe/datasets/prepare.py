"""Published files of a data set as feature sets: descriptors with their ids, labels, pairs and queries.

Each `prepare_…` function reads a folder or s3:// prefix, finds the files by their names, refuses what does not fit
together, and writes feature sets below `to`. Sets that are there already, made from the same files, are kept.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lattqe.datasets.revisited import check_expected_ids, load_gnd, save_gnd
from lattqe.datasets.synthetic import SyntheticSplit, SyntheticWorld
from lattqe.errors import LattqeError
from lattqe.evaluation import GroundTruth, Scores, evaluate
from lattqe.formats.reader import ENDINGS
from lattqe.formats.source import ImportSource, file_digest, local_files, open_source
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter, Place, open_place
from lattqe.store.local import scratch_folder

REVISITED_SETS = ("roxford5k", "rparis6k")
R1M_ROWS = 1_001_001  # published distractors
BOTH_IN_ONE = (("X", "Q"), ("vecs", "qvecs"))  # names of database and queries where one file holds both
POSITIVES = pa.field("positives", pa.list_(pa.string()))  # ids of the published positives of a row
BLOCK_ROWS = 8192

SetProgress = Callable[[str, int, int], None]  # name of the set, rows just written, rows in all


@dataclass
class Report:
    """What was made: feature sets by name; notes on what was assumed; warnings; scores without expansion by set."""

    made: dict[str, FeatureSet] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, Scores]] = field(default_factory=dict)


@dataclass(frozen=True)
class Folder:
    """A folder or prefix of published files: finds them by name and opens them on disk."""

    place: Place
    names: tuple[str, ...]

    @classmethod
    def open(cls, uri: str) -> "Folder":
        """List the files there."""
        place = open_place(uri)
        names = tuple(name for name in place.list() if not name.startswith(".") and "/." not in name)
        if not names:
            raise LattqeError(f"there are no files at {uri}: give the folder or s3:// prefix of the published files")
        return cls(place, names)

    def matrices(self, *patterns: str) -> list[str]:
        """Files of vectors whose names match one of the patterns, without ground truths."""
        return [
            name
            for name in self.names
            if PurePosixPath(name).suffix.lower() in ENDINGS
            and not stem(name).startswith("gnd")
            and any(re.search(pattern, stem(name)) for pattern in patterns)
        ]

    def uri(self, name: str) -> str:
        """Address of one file."""
        return f"{self.place.uri.rstrip('/')}/{name}"

    def one(self, found: Sequence[str], what: str) -> str:
        """The only file found."""
        if len(found) > 1:
            raise LattqeError(
                f"{self.place.uri} has {len(found)} files that may be {what} ({', '.join(found[:4])}): "
                "leave one of them there"
            )
        return found[0]


def stem(name: str) -> str:
    """The name of a file without folders and ending, in lower case."""
    return PurePosixPath(name).stem.lower()


def lacking_files(folder: Folder, missing: Sequence[str]) -> LattqeError:
    """The error that says which files a folder lacks, and which it has."""
    return LattqeError(
        f"{folder.place.uri} lacks {'; '.join(missing)} (there are: {', '.join(folder.names[:8])}"
        f"{', …' if len(folder.names) > 8 else ''})"
    )


def store(
    uri: str,
    blocks: Iterable[tuple[NDArray[Any], Sequence[str], NDArray[Any] | None]],
    dim: int,
    source: Mapping[str, object],
    dtype: str = "float32",
) -> FeatureSet:
    """Write blocks of (vectors, ids, labels) as a labelled feature set, unless it is there already."""
    writer = FeatureWriter(uri, dim, dtype, labels=True, config=source)
    if writer.finished is None:
        with writer:
            for vectors, ids, labels in blocks:
                writer.append(vectors, ids, labels)
    return FeatureSet.open(uri)


@dataclass(frozen=True)
class MatrixFile:
    """A file of vectors whose row r is that of ids[r]: what it is called, who says so, and what goes beside it."""

    uri: str
    ids: Sequence[str]
    said_by: str  # the file and the list that name the rows
    labels: NDArray[np.int32] | None = None
    positives: Sequence[Sequence[str]] | None = None
    key: str | None = None

    def source(self, local: str) -> tuple[ImportSource, list[str]]:
        """Open it, whichever way round it is; refuse another number of rows. Also what was assumed."""
        opened = open_source(local, key=self.key)
        notes = list(opened.notes)
        if opened.rows != len(self.ids) == opened.dim:
            opened = open_source(local, key=self.key, transposed=True)
            notes = [f"{self.uri}: its columns are the images"]
        if opened.rows != len(self.ids):
            raise LattqeError(
                f"{self.uri} holds {opened.rows:,} vectors of {opened.dim} numbers, but {self.said_by} "
                f"names {len(self.ids):,} images: give the descriptors of exactly these, in this order"
            )
        return opened, notes

    def write(self, to: str, dtype: str, report: Report, progress: SetProgress) -> FeatureSet:
        """Write the feature set, with the ids of the list; ids in the file itself must be the same."""
        name = to.rsplit("/", 1)[-1]
        with local_files({"matrix": self.uri}) as local:
            opened, notes = self.source(local["matrix"])
            config: dict[str, Any] = {"job": "dataset", "rows_named_by": self.said_by, "key": self.key}
            inputs = {"matrix": {"uri": self.uri, "digest": file_digest(local["matrix"]), "kind": "file"}}
            extra = [POSITIVES] if self.positives is not None else []
            writer = FeatureWriter(
                to, opened.dim, dtype, labels=self.labels is not None, config=config, inputs=inputs, extra=extra
            )
            if writer.finished is None:
                with writer:
                    self._append(writer, opened, partial(progress, name))
        report.notes += notes
        report.made[name] = FeatureSet.open(to)
        return report.made[name]

    def _append(self, writer: FeatureWriter, opened: ImportSource, progress: Callable[[int, int], None]) -> None:
        start = 0
        for block in opened.blocks(BLOCK_ROWS):
            rows = slice(start, start + len(block.vectors))
            if opened.has_ids and block.ids is not None:
                check_expected_ids(block.ids, self.ids[rows], f"{self.uri} (rows from {start} on)", self.said_by)
            beside = {} if self.positives is None else {"positives": pa.array(self.positives[rows], POSITIVES.type)}
            labels = None if self.labels is None else self.labels[rows]
            writer.append(block.vectors, list(self.ids[rows]), labels, beside)
            start = rows.stop
            progress(len(block.vectors), opened.rows)


def prepare_revisited(source: str, to: str, dtype: str = "float16", progress: SetProgress = lambda *_: None) -> Report:
    """Revisited Oxford and Paris, as many of the two as are there: NAME, NAME-queries and gnd_NAME.pkl below `to`.

    For each set the folder holds gnd_NAME.pkl (or .json), and one file with database and queries (X and Q, or vecs and
    qvecs), or two, of which that of the queries has 'queries', 'qvecs' or a single q in its name.
    """
    folder, report = Folder.open(source), Report()
    truths = {
        name: found
        for name in REVISITED_SETS
        for found in folder.names
        if PurePosixPath(found).name in (f"gnd_{name}.pkl", f"gnd_{name}.json")
    }
    found = {name: _revisited_matrices(folder, name) for name in REVISITED_SETS}
    present = [name for name in REVISITED_SETS if name in truths or any(found[name])]
    lacking = [f"gnd_{name}.pkl, the published ground truth" for name in present if name not in truths]
    lacking += [
        f"descriptors of the {what} of {name}"
        for name in present
        for what, files in zip(("database images", "queries"), found[name])
        if not files
    ]
    if lacking or not present:
        raise lacking_files(folder, lacking or ["gnd_roxford5k.pkl or gnd_rparis6k.pkl, with the descriptors"])
    for name in present:
        _prepare_revisited_set(folder, name, truths[name], found[name], to, dtype, report, progress)
    report.notes += [
        f"{name} is not there: only {present[0]} was made" for name in REVISITED_SETS if name not in present
    ]
    return report


def _revisited_matrices(folder: Folder, name: str) -> tuple[list[tuple[str, str | None]], list[tuple[str, str | None]]]:
    """Candidates (file, key) for database and queries of one set."""
    files = folder.matrices(name.rstrip("0123456789k"))
    queries = [file for file in files if re.search(r"quer|qvec|(^|[-_.])q([-_.]|$)", stem(file))]
    databases = [file for file in files if file not in queries]
    if databases and not queries and PurePosixPath(databases[0]).suffix.lower() not in (".npy", ".fvecs"):
        both = folder.one(databases, f"the descriptors of {name}")
        database_key, query_key = _keys_of(folder.uri(both))
        return [(both, database_key)], [(both, query_key)]
    return [(file, None) for file in databases], [(file, None) for file in queries]


def _keys_of(uri: str) -> tuple[str, str]:
    """Names of the database's and the queries' matrix in a file that holds both."""
    with local_files({"matrix": uri}) as local:
        for database, queries in BOTH_IN_ONE:
            try:
                open_source(local["matrix"], key=database)
                open_source(local["matrix"], key=queries)
            except LattqeError:
                continue
            return database, queries
    raise LattqeError(
        f"{uri} does not hold both database and queries as X and Q or vecs and qvecs: put the queries' "
        "descriptors next to it, in a file with 'queries' in its name"
    )


def _prepare_revisited_set(
    folder: Folder,
    name: str,
    truth_name: str,
    found: tuple[Sequence[Any], Sequence[Any]],
    to: str,
    dtype: str,
    report: Report,
    progress: SetProgress,
) -> None:
    with local_files({"truth": folder.uri(truth_name)}) as local:
        truth = load_gnd(local["truth"])
    sets = []
    for (which, files), ids, suffix in zip(
        (("imlist", found[0]), ("qimlist", found[1])), (truth.imlist, truth.qimlist), ("", "-queries")
    ):
        names = [file for file, _ in files]
        file = folder.one(names, f"the {'queries' if suffix else 'database'} of {name}")
        matrix = MatrixFile(folder.uri(file), ids, f"{which} of {truth_name}", key=dict(files)[file])
        sets.append(matrix.write(f"{to.rstrip('/')}/{name}{suffix}", dtype, report, progress))
    open_place(to).write(
        f"gnd_{name}.pkl" if truth_name.endswith(".pkl") else f"gnd_{name}.json", folder.place.read(truth_name)
    )
    report.scores[name] = plain_scores(sets[0], sets[1], truth.truth)
    if report.scores[name]["medium"].mean_ap < 0.05:
        report.warnings.append(
            f"{name}: mAP {100 * report.scores[name]['medium'].mean_ap:.1f} on Medium is chance: "
            f"are the rows in the order of imlist and qimlist of {truth_name}?"
        )


def plain_scores(database: FeatureSet, queries: FeatureSet, truth: GroundTruth) -> dict[str, Scores]:
    """Exact scores of the queries as they are, without expansion, in each setup."""
    return evaluate(FlatIndex(database.read()), queries.read().astype(np.float32), truth)


def prepare_r1m(
    sources: Sequence[str],
    to: str,
    ids: str | None = None,
    dtype: str = "float16",
    progress: SetProgress = lambda *_: None,
) -> Report:
    """The million distractors, from one file of vectors or several in order: r1m below `to`."""
    report = Report()
    files = {f"source-{number}": name for number, name in enumerate(sources)} | ({"ids": ids} if ids else {})
    with local_files(files) as local:
        opened = open_source([local[f"source-{number}"] for number in range(len(sources))], ids=local.get("ids"))
        report.notes += opened.notes
        if opened.rows != R1M_ROWS:
            report.notes.append(f"{opened.rows:,} distractors, of {R1M_ROWS:,} that were published")
        inputs = {role: {"uri": uri, "digest": file_digest(local[role]), "kind": "file"} for role, uri in files.items()}
        writer = FeatureWriter(f"{to.rstrip('/')}/r1m", opened.dim, dtype, config={"job": "dataset"}, inputs=inputs)
        if writer.finished is None:
            with writer:
                for block in opened.blocks(BLOCK_ROWS):
                    writer.append(block.vectors, block.ids or [])
                    progress("r1m", len(block.vectors), opened.rows)
    report.made["r1m"] = FeatureSet.open(f"{to.rstrip('/')}/r1m")
    return report


def prepare_synthetic(world: SyntheticWorld, to: str, progress: SetProgress = lambda *_: None) -> Report:
    """The synthetic landmarks: train, val, oxford, paris and distractors, with -queries and ground truths."""
    report, base = Report(), to.rstrip("/")
    for name in ("train", "val", "oxford", "paris", "distractors"):
        split = world.split(name)
        if split.rows:
            store_synthetic(split, base, report)
        if name in ("oxford", "paris"):
            with scratch_folder("dataset") as scratch:
                save_gnd(scratch / "gnd.json", split.revisited())
                open_place(base).write(f"gnd_{name}.json", (scratch / "gnd.json").read_bytes())
        progress(name, 1, 1)
    return report


def store_synthetic(split: SyntheticSplit, base: str, report: Report) -> None:
    """Write one split's database and, where it has any, its queries."""
    world = split.world
    source = {"synthetic": split.name, "seed": world.seed, "scale": world.scale, "rows": split.rows}
    report.made[split.name] = store(f"{base}/{split.name}", split.blocks(), split.dim, source)
    if split.queries:
        asked = [(split.query_vectors, split.query_ids, split.query_labels)]
        report.made[f"{split.name}-queries"] = store(f"{base}/{split.name}-queries", asked, split.dim, source)
