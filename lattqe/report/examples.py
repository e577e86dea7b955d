"""The queries that an expansion helps and harms most, as pictures for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lattqe.benchmark.inputs import Inputs
from lattqe.benchmark.spec import Dataset
from lattqe.evaluation.truth import Setup
from lattqe.expansion import create
from lattqe.expansion.rows import Found, expand_queries, nearest
from lattqe.report.gallery import Card, Tile, marks_of
from lattqe.report.page import best_expansion
from lattqe.report.thumbnails import Thumbnails
from lattqe.search.index import StoredIndex

EXTREMES = 10  # largest gains, and as many losses
RESULTS = 8  # of each list
PICTURE_BYTES = 8_000_000


@dataclass(frozen=True)
class Extreme:
    """A query of a run: where it stands, and its AP in percent before and after."""

    dataset: str
    setup: str
    id: str
    positives: int
    before: float
    after: float


@dataclass(frozen=True)
class Examples:
    """Cards under titles, and the pictures they number, in base64."""

    groups: tuple[tuple[str, tuple[tuple[str, Card], ...]], ...]
    pictures: tuple[str, ...]


def find_extremes(results: Mapping[str, Any], count: int = EXTREMES) -> tuple[list[Extreme], list[Extreme]]:
    """The largest gains and the largest losses of the best expansion over all data sets, each in its first setup."""
    label, seen, found = best_expansion(results)["label"], set(), []
    for table in results["per_query"]:
        if table["dataset"] not in seen:
            seen.add(table["dataset"])
            found += [
                Extreme(table["dataset"], table["setup"], *line)
                for line in zip(table["ids"], table["positives"], table["before"], table["after"][label])
            ]
    ordered = sorted(found, key=lambda each: each.before - each.after)
    gains = [each for each in ordered[:count] if each.after > each.before]
    return gains, [each for each in ordered[::-1][:count] if each.after < each.before]


def make_examples(results: Mapping[str, Any], datasets: Sequence[Dataset], images: Sequence[str]) -> Examples:
    """Search for the extreme queries again, before and after, and fetch the pictures."""
    gains, losses = find_extremes(results)
    thumbnails = Thumbnails(images)
    step = dict(best_expansion(results)["qe"])
    method, k = create(step.pop("method"), **{name: value for name, value in step.items() if name != "k"}), step["k"]
    cards: dict[Extreme, Card] = {}
    for dataset in datasets:
        mine = [each for each in (*gains, *losses) if each.dataset == dataset.name]
        if mine:
            cards |= _cards(Inputs.open(dataset), mine, method, k, thumbnails)
    groups = tuple(
        (title, tuple((each.dataset, cards[each]) for each in found))
        for title, found in (("Largest gains", gains), ("Largest losses", losses))
        if found
    )
    return Examples(groups, tuple(thumbnails.encoded(PICTURE_BYTES) or ()))


def _cards(
    inputs: Inputs, found: Sequence[Extreme], method: Any, k: int, thumbnails: Thumbnails
) -> dict[Extreme, Card]:
    place = {name: number for number, name in enumerate(inputs.queries.ids())}
    numbers = np.array([place[each.id] for each in found])
    index, xq = StoredIndex([inputs.database]), inputs.queries.gather(numbers).astype(np.float32)
    exclude = None if inputs.exclude is None else inputs.exclude[numbers]
    shown = min(RESULTS, index.rows - (exclude is not None))
    expanded = expand_queries(index, xq, method, k, exclude=exclude)
    weights = [
        {row: weight for row, weight in zip(rows, given) if row >= 0}
        for rows, given in zip(expanded.rows[:, 1 : 1 + k].tolist(), expanded.weights[:, 1 : 1 + k].tolist())
    ]
    lists: list[tuple[str, Found]] = [
        ("before", nearest(index, xq, shown, exclude)),
        ("after", nearest(index, expanded.vectors, shown, exclude)),
    ]
    shown_rows = np.unique(np.concatenate([ids[ids >= 0] for _, (_, ids) in lists]))
    names = dict(zip(shown_rows.tolist(), inputs.database.gather_ids(shown_rows)))
    cards = {}
    for at, each in enumerate(found):
        setup = next(one for one in inputs.truth.setups if one.name == each.setup)
        sides = tuple(
            (title, _tiles(inputs, int(numbers[at]), ids[at], scores[at], names, weights[at], setup, thumbnails))
            for title, (scores, ids) in lists
        )
        cards[each] = Card(
            int(numbers[at]), each.id, thumbnails.get(each.id), each.positives, each.after, each.before, sides
        )
    return cards


def _tiles(
    inputs: Inputs,
    query: int,
    rows: np.ndarray,
    scores: np.ndarray,
    names: Mapping[int, str],
    weights: Mapping[int, float],
    setup: Setup,
    thumbnails: Thumbnails,
) -> tuple[Tile, ...]:
    marks = marks_of(inputs.truth, query, rows.astype(np.int64), setup)
    return tuple(
        Tile(rank, names[row], thumbnails.get(names[row]), score, weights.get(row), mark)
        for rank, (row, score, mark) in enumerate(zip(rows.tolist(), scores.tolist(), marks), start=1)
        if row >= 0
    )
