"""Revisited Oxford and Paris: their ground-truth files, read, checked and written, and the paper's published numbers.

A ground truth is the published pickle, read without running anything in it, or JSON with the same keys:
`imlist` and `qimlist` (names), `gnd` (for each query `easy`, `hard`, `junk` database rows, and `bbx` if it is cropped).
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.evaluation.truth import GradedTruth, Judgements
from lattqe.formats import pickle_file
from lattqe.formats.reader import check_file

GRADES = ("easy", "hard", "junk")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class RevisitedSet:
    """One ground-truth file.

    imlist, qimlist: names of the database images and of the queries, in row order. gnd: for each query its easy, hard
    and junk rows. boxes: for each query the crop (x1, y1, x2, y2) in pixels, or None for the whole image.
    """

    imlist: tuple[str, ...]
    qimlist: tuple[str, ...]
    gnd: tuple[dict[str, list[int]], ...]
    boxes: tuple[Box | None, ...]
    truth: GradedTruth

    @property
    def database_rows(self) -> int:
        """Number of database images, without distractors."""
        return len(self.imlist)

    @property
    def queries(self) -> int:
        """Number of queries."""
        return len(self.qimlist)

    def check_database(self, ids: Sequence[str], name: str = "database") -> None:
        """Refuse a database whose first rows are not `imlist`. Rows after them are distractors."""
        check_expected_ids(ids[: self.database_rows], self.imlist, name, "imlist")

    def check_queries(self, ids: Sequence[str], name: str = "queries") -> None:
        """Refuse queries that are not `qimlist`."""
        if len(ids) > self.queries:
            raise LattqeError(f"{name} has {len(ids)} rows, but qimlist of the ground truth {self.queries}")
        check_expected_ids(ids, self.qimlist, name, "qimlist")


def image_name(identifier: str) -> str:
    """'jpg/all_souls_000013.jpg' -> 'all_souls_000013': ids may carry folders and an image suffix, the lists do not."""
    path = PurePosixPath(identifier)
    return path.stem if path.suffix.lower() in (".jpg", ".jpeg", ".png") else path.name


def check_expected_ids(ids: Sequence[str], expected: Sequence[str], name: str, list_name: str) -> None:
    """Refuse ids that are not the expected names in the same order, naming the first that differs.

    Ids that are bare row numbers, as imports of nameless arrays have them, say nothing and are accepted.
    """
    if len(ids) != len(expected):
        missing = sorted({image_name(e) for e in expected} - {image_name(i) for i in ids})
        lacking = f" (missing: {missing[0]}, and {len(missing) - 1} more)" if missing else ""
        raise LattqeError(f"{name} has {len(ids)} rows, but {list_name} of the ground truth {len(expected)}{lacking}")
    if all(identifier.isdecimal() and int(identifier) == row for row, identifier in enumerate(ids)):
        return
    for row, (identifier, wanted) in enumerate(zip(ids, expected)):
        if image_name(identifier) != image_name(wanted):
            same = sorted(map(image_name, ids)) == sorted(map(image_name, expected))
            remedy = "the same images in another order: sort them" if same else "they are other images"
            raise LattqeError(f"row {row} of {name} is {identifier!r}, but {list_name} says {wanted!r}: {remedy}")


def load_gnd(path: str | Path) -> RevisitedSet:
    """Read and check a ground-truth file, .pkl or .json; anything wrong with it is refused by name."""
    path = Path(path)
    if path.suffix in (".npy", ".txt", ".csv"):
        raise LattqeError(f"{path} is not a ground truth (gnd_*.pkl or .json): give labels to `lattqe import --labels`")
    content = _read_json(path) if path.suffix == ".json" else pickle_file.load(path)
    try:
        return from_gnd(content)
    except LattqeError as error:
        raise LattqeError(f"ground truth {path}: {error}") from error


def save_gnd(path: str | Path, revisited: RevisitedSet) -> None:
    """Write a ground truth as JSON, readable by `load_gnd`."""
    gnd = [
        {**{grade: lists[grade] for grade in GRADES}, **({"bbx": list(box)} if box else {})}
        for lists, box in zip(revisited.gnd, revisited.boxes)
    ]
    content = {"imlist": list(revisited.imlist), "qimlist": list(revisited.qimlist), "gnd": gnd}
    # Under another name first: a file of this name is always whole.
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def from_gnd(content: Any) -> RevisitedSet:
    """Check the content of a ground-truth file: {'imlist': [...], 'qimlist': [...], 'gnd': [{...}, ...]}."""
    if not isinstance(content, Mapping):
        raise LattqeError(f"expected a dict with imlist, qimlist and gnd, found a {type(content).__name__}")
    missing = [key for key in ("imlist", "qimlist", "gnd") if key not in content]
    if missing:
        raise LattqeError(f"key {missing[0]!r} is missing; a ground truth has imlist, qimlist and gnd")
    imlist, qimlist = (_names(content[key], key) for key in ("imlist", "qimlist"))
    entries = content["gnd"]
    if not isinstance(entries, Sequence) or len(entries) != len(qimlist):
        count = len(entries) if isinstance(entries, Sequence) else type(entries).__name__
        raise LattqeError(f"gnd has {count} entries for {len(qimlist)} names in qimlist")
    gnd = tuple(_lists(entry, f"query {i} ({qimlist[i]})") for i, entry in enumerate(entries))
    boxes = tuple(_box(entry.get("bbx"), f"query {i} ({qimlist[i]})") for i, entry in enumerate(entries))
    judgements = Judgements.from_lists(*([lists[grade] for lists in gnd] for grade in GRADES))
    return RevisitedSet(imlist, qimlist, gnd, boxes, GradedTruth(judgements, len(imlist)))


def _read_json(path: Path) -> Any:
    check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LattqeError(f"{path} is not JSON: {error}") from error


def _names(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise LattqeError(f"{key} must be a list of names, found a {type(value).__name__}")
    names = tuple(value)
    if not names:
        raise LattqeError(f"{key} is empty")
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise LattqeError(f"{key} contains {twice!r} twice")
    return names


def _lists(entry: Any, query: str) -> dict[str, list[int]]:
    if not isinstance(entry, Mapping):
        raise LattqeError(f"{query}: expected a dict with easy, hard and junk, found a {type(entry).__name__}")
    missing = [grade for grade in GRADES if grade not in entry]
    if missing:
        raise LattqeError(f"{query}: list {missing[0]!r} is missing")
    return {grade: _rows(entry[grade], f"{query}, {grade}") for grade in GRADES}


def _rows(value: Any, where: str) -> list[int]:
    try:
        array = np.asarray(value)
        if array.size == 0:
            return []
        rows = array.reshape(-1).astype(np.int64)
        if array.dtype.kind not in "iuf" or not np.array_equal(rows, array.reshape(-1)):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise LattqeError(f"{where}: row numbers expected, found {value!r:.80}") from None
    return rows.tolist()


def _box(value: Any, query: str) -> Box | None:
    if value is None:
        return None
    try:
        x1, y1, x2, y2 = (float(number) for number in value)
    except (ValueError, TypeError):
        raise LattqeError(f"{query}: bbx must be four numbers x1, y1, x2, y2, found {value!r:.80}") from None
    if not all(map(math.isfinite, (x1, y1, x2, y2))) or x2 <= x1 or y2 <= y1:
        raise LattqeError(f"{query}: bbx {[x1, y1, x2, y2]} is empty; it is x1, y1, x2, y2 with x1 < x2 and y1 < y2")
    return x1, y1, x2, y2


@cache
def published_scores() -> dict[str, Any]:
    """Everything in the file, in percent. Treat it as read-only.

    golden: no-expansion results of the paper's features, which must come out before anything else is compared.
    table2: ablations; table3: all methods, `kind` none, qe or dba+qe, by set ('roxford5k', 'roxford5k+r1m', ...) and
    setup; figure4: relative gains `by_positives` and `by_ap_before`, three groups for each setup. Figure 3 was
    published as a drawing only.
    """
    return json.loads(resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8"))


def golden_differences(dataset: str, measured: dict[str, float], tolerance: float = 0.1) -> list[str]:
    """Compare no-expansion mAP in percent by setup with the golden numbers; returns one line for each that differs.

    dataset: 'roxford5k' or 'rparis6k'. The tolerance allows for rounding of the descriptors to float16.
    """
    golden = published_scores()["golden"]["map"][dataset]
    return [
        f"{dataset} {setup}: mAP {measured[setup]:.2f} without expansion, {value:.2f} expected of the paper's features"
        for setup, value in golden.items()
        if setup in measured and abs(measured[setup] - value) > tolerance
    ]
