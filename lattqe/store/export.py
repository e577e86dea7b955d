"""Artifacts for other tools: a feature set as a matrix or a faiss index, ranks as a table, a graph as a sparse matrix.

Each file is written whole in one pass over the blocks. `FILE.export.json` beside it says what it was made from: it is
created first and exclusively, so of two different exports to one name one is refused, and the same export repeated
continues after a kill and finds itself up to date when it is finished.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.artifacts import NeighborGraph, Ranks
from lattqe.store.features import FeatureSet, bad_ids
from lattqe.store.manifest import seal_json, unseal_json
from lattqe.store.parts import StoredRows
from lattqe.store.pending import differences
from lattqe.store.place import MissingFileError, Place, open_place

BLOCK_ROWS = 16_384
# Enough for 1,000 centroids by faiss's own rule of 256 points for each; more costs time and changes little.
TRAINING_ROWS = 262_144
INDEXES = (".faiss", ".index")
SUFFIXES = {"features": (".npy", ".fvecs", *INDEXES), "ranks": (".csv", ".json"), "neighbors": (".npz",)}
FORMULA = ("=", "+", "-", "@")

Writer: TypeAlias = Callable[[BinaryIO], None]


@dataclass(frozen=True)
class Exported:
    """The files that were written, the main one first; `reused` where they were there already."""

    names: list[str]
    reused: bool


def export_features(features: FeatureSet, to: str, factory: str | None = None) -> Exported:
    """Write `to` (by its suffix .npy, .fvecs, .faiss or .index), with ids and labels in text files beside it.

    A faiss index is flat unless `factory` is a faiss factory string. `to` appears last: where it is, all is.
    """
    suffix = check_suffix("features", to)
    if factory is not None and suffix not in INDEXES:
        raise LattqeError(f"a faiss factory string ({factory}) does not apply to a {suffix} file")
    beside: dict[str, Writer] = {".ids.txt": lambda file: _write_lines(_ids(features), file)}
    if features.has_labels:
        beside[".labels.txt"] = lambda file: _write_lines(_labels(features), file)
    if suffix in INDEXES:

        def write(file: BinaryIO) -> None:
            _write_index(build_faiss_index(features, factory or "Flat"), file)
    else:

        def write(file: BinaryIO) -> None:
            (_write_npy if suffix == ".npy" else _write_fvecs)(features, file)

    return _publish(to, _plan(features, factory=factory), beside, write)


def export_ranks(ranks: Ranks, to: str, database: Sequence[str] = ()) -> Exported:
    """Write a table of query, rank (from 1), id, score and label as .csv or .json; ids and labels are the database's.

    `database` are the addresses of the sets that were searched, where they are no longer where the ranks say.
    """
    suffix = check_suffix("ranks", to)
    searched = ranks.searched(database)
    names = [name for features in searched for chunk in _ids(features) for name in chunk]
    labels = [name for features in searched for chunk in _labels(features) for name in chunk]

    def write(file: BinaryIO) -> None:
        (_write_csv if suffix == ".csv" else _write_json)(_rank_rows(ranks, names, labels), file)

    return _publish(to, _plan(ranks), {}, write)


def export_graph(graph: NeighborGraph, to: str, similarities: bool = False, with_self: bool = False) -> Exported:
    """Write a scipy CSR matrix (.npz): entry (i, j) is the cosine distance 1 - score of row i's neighbor j.

    With `similarities` the entries are the scores; `with_self` puts each row before its neighbors (`sparse_graph`).
    """
    import scipy.sparse

    check_suffix("neighbors", to)

    def write(file: BinaryIO) -> None:
        scipy.sparse.save_npz(file, sparse_graph(graph, similarities, with_self), compressed=False)

    return _publish(to, _plan(graph, similarities=similarities, with_self=with_self), {}, write)


def sparse_graph(graph: NeighborGraph, similarities: bool = False, with_self: bool = False) -> Any:
    """The graph as a scipy CSR matrix (n, n) float32 of distances, or of `similarities`; all of it in memory.

    Rows hold their neighbors by rising distance. Estimators of scikit-learn that look up the rows they were fitted on
    (TSNE, Isomap, NearestNeighbors) take the first entry for the row itself and drop it: they need `with_self`.
    """
    import scipy.sparse

    I, D = graph.read()
    if with_self:
        I = np.hstack([np.arange(graph.rows, dtype=I.dtype)[:, None], I])
        D = np.hstack([np.ones((graph.rows, 1), D.dtype), D])
    there = I >= 0
    values = D[there] if similarities else np.maximum(np.float32(1) - D[there], 0)
    bounds = np.concatenate(([0], np.cumsum(there.sum(axis=1))))
    return scipy.sparse.csr_matrix((values, I[there], bounds), shape=(graph.rows, graph.database_rows or graph.rows))


def check_suffix(kind: str, to: str) -> str:
    """The suffix of an export's name; LattqeError where nothing of that kind is written so."""
    suffix = PurePosixPath(to).suffix
    if suffix not in SUFFIXES[kind]:
        raise LattqeError(f"cannot export to {to}: the name must end in one of {', '.join(SUFFIXES[kind])}")
    return suffix


def check_faiss(dim: int, to: str | None, factory: str | None) -> None:
    """Refuse what would fail, or count for nothing, only when the index that is to be written to `to` is there."""
    if to is None:
        if factory is not None:
            raise LattqeError("--factory needs --faiss: name the file of the faiss index, or leave --factory out")
        return
    if check_suffix("features", to) not in INDEXES:
        raise LattqeError(f"--faiss {to}: the name must end in one of {', '.join(INDEXES)}")
    if factory is not None:
        new_faiss_index(dim, factory)


def plain_cell(text: str) -> str:
    """A text for a cell of a CSV file: no control characters, and a ' before what looks like a formula."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return f"'{text}" if text.startswith(FORMULA) else text


def _plan(artifact: StoredRows, **options: Any) -> dict[str, Any]:
    return {"kind": artifact.kind, "digest": artifact.digest, "options": options}


def _publish(to: str, plan: dict[str, Any], beside: Mapping[str, Writer], write: Writer) -> Exported:
    """Write the files beside `to` (by what follows its name), then `to` itself."""
    place, name = _split(to)
    record = f"{name}.export.json"
    names = [name, *(f"{name}{end}" for end in beside)]
    claimed = _claim(place, names, record, plan)
    if claimed is None:
        return Exported(names, reused=True)
    written: list[str] = []
    try:
        for end, write_beside in beside.items():
            written.append(f"{name}{end}")
            _write(place, written[-1], write_beside)
        _write(place, name, write)
    except BaseException:
        for other in [*written, record] if claimed else []:
            place.delete(other)
        raise
    place.write(record, seal_json({"plan": plan, "files": {each: place.size(each) for each in names}}))
    return Exported(names, reused=False)


def _claim(place: Place, names: list[str], record: str, plan: dict[str, Any]) -> bool | None:
    """True where this process claims the names, False where it continues an equal export, None where all is there."""
    taken = [each for each in names if place.exists(each)]
    if taken and not place.exists(record):
        raise AlreadyExistsError(f"{place.uri}/{taken[0]} exists already: choose another name or delete it")
    try:
        place.create(record, seal_json({"plan": plan, "files": None}))
        return True
    except AlreadyExistsError:
        there = unseal_json(place.read(record), f"{place.uri}/{record}")
    found = differences(plan, there.get("plan"))
    if found:
        raise AlreadyExistsError(
            f"{place.uri}/{names[0]} is another export ({found[0]}): choose another name, or delete it and {record}"
        )
    files = there.get("files") or {}
    return None if files and all(_size(place, each) == size for each, size in files.items()) else False


def write_file(to: str, data: bytes) -> None:
    """Put a small file at an address, on disk or S3, replacing what is there."""
    place, name = _split(to)
    place.write(name, data)


def _size(place: Place, name: str) -> int | None:
    try:
        return place.size(name)
    except MissingFileError:
        return None


def _write(place: Place, name: str, write: Writer) -> None:
    with place.open_output(name) as file:
        write(file)


def _split(to: str) -> tuple[Place, str]:
    """The folder and the name of a file's address."""
    folder, slash, name = to.rpartition("/")
    if not name or folder.endswith(":/"):  # s3://bucket is not a file
        raise LattqeError(f"cannot export to {to!r}: give the name of a file")
    return open_place(folder or ("/" if slash else ".")), name


def _ids(features: FeatureSet) -> Iterator[list[str]]:
    """The ids, some at a time; a forged set cannot put one over several lines."""
    for start in range(0, features.rows, BLOCK_ROWS):
        ids = features.ids(start, min(start + BLOCK_ROWS, features.rows))
        wrong = np.flatnonzero(bad_ids(pa.array(ids, pa.string())))
        if len(wrong):
            raise CorruptDataError(f"{features.uri}: the id of row {start + wrong[0]} is empty or holds a line break")
        yield ids


def _labels(features: FeatureSet) -> Iterator[list[str]]:
    """The labels, some at a time, as their names where they have names; empty texts where there are no labels."""
    names = features.label_names
    for start in range(0, features.rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, features.rows)
        if not features.has_labels:
            yield [""] * (stop - start)
            continue
        labels = features.labels(start, stop)
        if names is not None and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
            raise CorruptDataError(f"{features.uri}: some labels of rows {start}:{stop} have no name")
        yield [str(label) if names is None else names[label] for label in labels.tolist()]


def _write_lines(chunks: Iterator[list[str]], file: BinaryIO) -> None:
    for chunk in chunks:
        file.write("".join(f"{value}\n" for value in chunk).encode())


def _finite_blocks(features: FeatureSet) -> Iterator[np.ndarray]:
    for start, block in features.blocks(BLOCK_ROWS):
        wrong = np.flatnonzero(~np.isfinite(block).all(axis=1))
        if len(wrong):
            raise CorruptDataError(f"{features.uri}: the vector of row {start + wrong[0]} holds NaN or infinity")
        yield block


def _write_npy(features: FeatureSet, file: BinaryIO) -> None:
    shape = (features.rows, features.dim)
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.dtype(features.dtype).str, "fortran_order": False, "shape": shape}
    )
    for block in _finite_blocks(features):
        file.write(np.ascontiguousarray(block).data.cast("B"))


def _write_fvecs(features: FeatureSet, file: BinaryIO) -> None:
    """Each row is its dimension as int32, then its components as float32."""
    for block in _finite_blocks(features):
        rows = np.empty((len(block), features.dim + 1), np.float32)
        rows.view(np.int32)[:, 0] = features.dim
        rows[:, 1:] = block
        file.write(rows.data.cast("B"))


def build_faiss_index(features: FeatureSet, factory: str) -> Any:
    """A faiss index by inner product over all rows, trained on a sample that depends on the number of rows alone."""
    index = new_faiss_index(features.dim, factory)
    if not index.is_trained:
        rows = np.arange(features.rows)
        if features.rows > TRAINING_ROWS:
            rows = np.sort(np.random.default_rng(0).choice(features.rows, TRAINING_ROWS, replace=False))
        try:
            index.train(features.gather(rows).astype(np.float32))
        except RuntimeError as error:
            raise LattqeError(f"faiss cannot train {factory!r} on {len(rows)} rows: use a smaller one") from error
    for block in _finite_blocks(features):
        index.add(block.astype(np.float32))
    return index


def new_faiss_index(dim: int, factory: str) -> Any:
    """An empty faiss index by inner product; LattqeError where faiss does not know the factory string."""
    import faiss

    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise LattqeError(
            f"faiss does not know the factory string {factory!r} for {dim} dimensions: try "
            'Flat, "IVF256,PQ16" or HNSW32'
        ) from error


def _write_index(index: Any, file: BinaryIO) -> None:
    import faiss

    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]


def _rank_rows(ranks: Ranks, names: list[str], labels: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(id of the query, its results) of one query after the other."""
    for start, I, D in ranks.blocks(BLOCK_ROWS):
        if I.size and not -1 <= int(I.min()) <= int(I.max()) < len(names):
            raise CorruptDataError(
                f"{ranks.uri}: some of rows {start}:{start + len(I)} name rows beyond the "
                f"{len(names)} that were searched"
            )
        texts = D.astype(str)  # the shortest that reads back as the same float32
        for row, query in enumerate(ranks.ids(start, start + len(I))):
            yield (
                query,
                [
                    {"rank": rank, "id": names[found], "score": float(texts[row, rank - 1]), "label": labels[found]}
                    for rank, found in enumerate(I[row].tolist(), 1)
                    if found >= 0
                ],
            )


def _write_csv(rows: Iterator[tuple[str, list[dict[str, Any]]]], file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("query", "rank", "id", "score", "label"))
    for query, results in rows:
        writer.writerows(
            (plain_cell(query), one["rank"], plain_cell(one["id"]), one["score"], plain_cell(one["label"]))
            for one in results
        )
    text.detach()


def _write_json(rows: Iterator[tuple[str, list[dict[str, Any]]]], file: BinaryIO) -> None:
    """One object for each query, each on its own line."""
    before = "[\n"
    for query, results in rows:
        file.write(f"{before}{json.dumps({'query': query, 'results': results}, ensure_ascii=False)}".encode())
        before = ",\n"
    file.write(b"\n]\n")
