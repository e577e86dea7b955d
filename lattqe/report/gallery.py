"""The gallery: one HTML page with queries, their first results before and after, and what each neighbor weighed.

Its pictures are found by their ids in folders and buckets, and are small enough together for one page. Weights are not
stored with ranks, but they can be made again.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lattqe.augmentation.recipe import adaptation_for
from lattqe.errors import LattqeError
from lattqe.evaluation.analysis import JudgedRanks
from lattqe.evaluation.truth import GroundTruth, Setup
from lattqe.expansion import create
from lattqe.expansion.base import Method
from lattqe.expansion.rows import Found, candidates, expand_queries, without_own
from lattqe.extraction.image import IMAGE_SUFFIXES, BadImage, Box, Framing, decode, read_image_file
from lattqe.search.index import StoredIndex
from lattqe.store import MissingFileError, Place, UnavailableError, open_place, read_manifest

# Long side in pixels and JPEG quality, from the finest to the coarsest.
LADDER = ((176, 78), (144, 72), (120, 66), (96, 60), (72, 52), (56, 45), (40, 35))
TEMPLATE = Path(__file__).with_name("gallery.html")
PAGE_BYTES = 20_000_000
MARKUP_BYTES = 700  # of one tile without its picture, at most that is usual
# How queries are chosen and ordered: the key of a card, smallest first.
ORDERS: dict[str, Callable[["Card"], float]] = {
    "change": lambda card: -abs(card.gain),
    "gain": lambda card: -card.gain,
    "loss": lambda card: card.gain,
    "worst": lambda card: card.ap,
    "best": lambda card: -card.ap,
    "order": lambda card: card.number,
}
NEEDS_TRUTH = ("gain", "loss", "change", "worst", "best")
# Beyond this many rows neighbors are not searched for again: they come from the plain ranks, or weights are left out.
LARGEST_SEARCH = 50_000


class Thumbnails:
    """Pictures by id; each is read and decoded once, and has a number from 0 on."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = [open_place(uri) for uri in places]
        self._numbers: dict[tuple[str, Box | None], int | None] = {}
        self._pictures: list[bytes] = []
        self._suffixes = list(IMAGE_SUFFIXES)
        self.missing: list[str] = []  # ids without a picture, in the order in which they were requested

    def get(self, identifier: str, box: Box | None = None) -> int | None:
        """The number of the picture of an id, cropped to `box`; None where its file is missing or broken."""
        key = (identifier, box)
        if key not in self._numbers:
            picture = self._read(identifier, box)
            if picture is None:
                self.missing.append(identifier)
            else:
                self._pictures.append(picture)
            self._numbers[key] = None if picture is None else len(self._pictures) - 1
        return self._numbers[key]

    def _read(self, identifier: str, box: Box | None) -> bytes | None:
        for place in self._places:
            for stem in dict.fromkeys((identifier, PurePosixPath(identifier).name)):
                data = self._find(place, stem)
                if data is not None:
                    try:
                        return _jpeg(Image.fromarray(decode(data, Framing(size=LADDER[0][0]), box)), LADDER[0][1])
                    except BadImage:
                        return None
        return None

    def _find(self, place: Place, stem: str) -> bytes | None:
        """The file of this name, or with a usual suffix; the suffix that was right last time is tried first."""
        for suffix in tuple(self._suffixes):
            try:
                data = read_image_file(place, stem + suffix)
            except UnavailableError:
                raise
            except (MissingFileError, BadImage, LattqeError):
                continue
            self._suffixes.remove(suffix)
            self._suffixes.insert(0, suffix)
            return data
        return None

    def encoded(self, budget: int) -> list[str] | None:
        """All pictures in base64, as fine as they can be within `budget` bytes; None where they cannot."""
        for side, quality in LADDER:
            texts, total = [], 0
            for picture in self._pictures:
                texts.append(base64.b64encode(_smaller(picture, side, quality)).decode("ascii"))
                total += len(texts[-1])
                if total > budget:
                    break
            else:
                return texts
        return None


def _smaller(picture: bytes, side: int, quality: int) -> bytes:
    if (side, quality) == LADDER[0]:
        return picture
    with Image.open(io.BytesIO(picture)) as image:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return _jpeg(image, quality)


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


@dataclass(frozen=True)
class Tile:
    """One result: its rank from 1 on, id, picture, score, weight as a neighbor (None: was none), and what it is."""

    rank: int
    id: str
    picture: int | None
    score: float
    weight: float | None
    mark: str  # 'right', 'wrong', 'junk', or '' where there is no ground truth


@dataclass(frozen=True)
class Card:
    """One query with its lists; AP in percent, NaN without ground truth."""

    number: int
    id: str
    picture: int | None = None
    positives: int = 0
    ap: float = float("nan")
    before: float | None = None  # AP of the other ranks
    lists: tuple[tuple[str, tuple[Tile, ...]], ...] = ()

    @property
    def gain(self) -> float:
        """Points of AP; 0 without other ranks."""
        return 0.0 if self.before is None else self.ap - self.before


@dataclass(frozen=True)
class Examples:
    """Cards under titles, and the pictures they number, in base64."""

    groups: tuple[tuple[str, tuple[tuple[str, Card], ...]], ...]
    pictures: tuple[str, ...]


@dataclass(frozen=True)
class Gallery:
    """What is to be shown: ranks, perhaps others to compare them with, and perhaps the weights of an expansion.

    weights: for a query's number, its neighbors' weights by row.
    """

    ranks: JudgedRanks
    against: JudgedRanks | None = None
    setup: str | None = None
    weights: Mapping[int, Mapping[int, float]] | None = None

    def __post_init__(self) -> None:
        if self.against is not None and self.against.ranks.ids() != self.ranks.ranks.ids():
            raise LattqeError(
                f"{self.against.ranks.uri} and {self.ranks.ranks.uri} answer other queries: compare "
                "ranks of the same queries in the same order"
            )
        if self.setup is not None and self.setup not in [one.name for one in self.setups]:
            raise LattqeError(
                f"there is no setup {self.setup!r}: choose one of "
                f"{', '.join(one.name for one in self.setups) or '(none: there is no ground truth)'}"
            )

    @property
    def setups(self) -> tuple[Setup, ...]:
        """The ways in which results are judged."""
        return self.ranks.truth.setups if self.ranks.has_truth else ()

    @property
    def judged_by(self) -> Setup | None:
        """The setup requested; Medium of the revisited three."""
        if self.setup is not None:
            return next(one for one in self.setups if one.name == self.setup)
        return self.setups[len(self.setups) // 2] if self.setups else None

    def default_order(self) -> str:
        """The largest changes first; without others the worst; without ground truth as they are stored."""
        if self.judged_by is None:
            return "order"
        return "change" if self.against is not None else "worst"

    def cards(self) -> list[Card]:
        """All queries that have something relevant, with their AP and no lists yet."""
        names = self.ranks.ranks.ids()
        if self.judged_by is None:
            return [Card(number, name) for number, name in enumerate(names)]
        mine = self.ranks.scores[self.judged_by.name]
        other = self.against.scores[self.judged_by.name] if self.against is not None else None
        return [
            Card(
                number,
                names[number],
                positives=int(mine.positives[number]),
                ap=100 * float(mine.ap[number]),
                before=None if other is None else 100 * float(other.ap[number]),
            )
            for number in np.flatnonzero(mine.evaluated).tolist()
        ]


def choose(cards: Sequence[Card], order: str, count: int) -> list[Card]:
    """The first `count` cards in an order; of 'change' half are the largest gains and half the largest losses."""
    if order not in ORDERS:
        raise LattqeError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
    if count < 1:
        raise LattqeError(f"cannot show {count} queries: give at least 1")
    if order == "change" and len(cards) > count:
        gains = sorted(cards, key=ORDERS["gain"])
        cards = [*gains[: (count + 1) // 2], *gains[len(gains) - count // 2 :]]
    return sorted(cards, key=lambda card: (ORDERS[order](card), card.number))[:count]


def fill(
    gallery: Gallery,
    cards: Sequence[Card],
    thumbnails: Thumbnails,
    results: int,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[Card]:
    """The cards with their first `results` results and pictures; `on_done(1)` is called after each."""
    if results < 1:
        raise LattqeError(f"cannot show {results} results: give at least 1")
    boxes = gallery.ranks.gnd.boxes if gallery.ranks.gnd is not None else None
    sides = [("after" if gallery.against is not None else "", gallery.ranks)]
    if gallery.against is not None:
        sides.insert(0, ("before", gallery.against))
    filled = []
    for card in cards:
        lists = tuple((title, _tiles(gallery, side, card.number, thumbnails, results)) for title, side in sides)
        picture = thumbnails.get(card.id, boxes[card.number] if boxes is not None else None)
        filled.append(Card(card.number, card.id, picture, card.positives, card.ap, card.before, lists))
        on_done(1)
    return filled


def _tiles(gallery: Gallery, side: JudgedRanks, query: int, thumbnails: Thumbnails, results: int) -> tuple[Tile, ...]:
    I, D = (found[0, :results] for found in side.ranks.read(query, query + 1))
    kept = I >= 0
    rows, scores = I[kept].astype(np.int64), D[kept]
    names = side.names(rows.tolist())
    setup = gallery.judged_by
    marks = [""] * len(rows) if setup is None else marks_of(side.truth, query, rows, setup)
    weights = {} if gallery.weights is None else gallery.weights.get(query, {})
    return tuple(
        Tile(rank, names[row], thumbnails.get(names[row]), float(score), weights.get(row), mark)
        for rank, (row, score, mark) in enumerate(zip(rows.tolist(), scores.tolist(), marks), start=1)
    )


def marks_of(truth: GroundTruth, query: int, rows: NDArray[np.int64], setup: Setup) -> list[str]:
    """What each of the rows (n,) is for a query: 'right', 'wrong' or 'junk'."""
    (grades,) = truth.judgements(query, query + 1).grades_of(rows[None])
    return [
        "right" if grade in setup.positive else "junk" if grade in setup.junk else "wrong" for grade in grades.tolist()
    ]


def render_gallery(
    gallery: Gallery,
    cards: Sequence[Card],
    thumbnails: Thumbnails,
    title: str,
    order: str,
    facts: Mapping[str, str],
    budget: int = PAGE_BYTES,
) -> str:
    """The page. Pictures become smaller where there are many; what still does not fit is refused."""
    tiles = sum(len(found) for card in cards for _, found in card.lists) + len(cards)
    pictures = thumbnails.encoded(budget - 20_000 - MARKUP_BYTES * tiles)
    page = None if pictures is None else _render(gallery, cards, pictures, title, order, facts)
    if page is None or len(page.encode()) > budget:
        raise LattqeError(
            f"{len(cards)} queries with {tiles} pictures do not fit into a page of "
            f"{budget / 1e6:.0f} MB: show fewer with --queries or --results"
        )
    return page


def _render(
    gallery: Gallery, cards: Sequence[Card], pictures: list[str], title: str, order: str, facts: Mapping[str, str]
) -> str:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    setup = gallery.judged_by
    values: dict[str, Any] = {
        "title": title,
        "cards": cards,
        "pictures": pictures,
        "order": order,
        "facts": facts,
        "depth": gallery.ranks.ranks.k,
        "setup": "" if setup is None or setup.name == "label" else setup.name,
        "judged": setup is not None,
        "compared": gallery.against is not None,
        "weighed": gallery.weights is not None,
        "orders": [name for name in ORDERS if _offered(name, setup is not None, gallery.against is not None)],
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)


def _offered(order: str, judged: bool, compared: bool) -> bool:
    if order in ("gain", "loss", "change"):
        return judged and compared
    return judged or order not in NEEDS_TRUTH


Weights = Mapping[int, Mapping[int, float]]


def neighbor_weights(
    ranks: JudgedRanks, plain: JudgedRanks | None, queries: Sequence[int]
) -> tuple[Weights | None, str]:
    """For each of the queries the weights of its neighbors by row; or None and why there are none.

    `plain` spares the search for neighbors where it holds ranks without expansion of the same rows, deep enough.
    """
    expand = ranks.ranks.manifest.config.get("expand")
    if not expand:
        return None, ""
    try:
        method = _method(ranks, expand)
    except LattqeError as error:
        return None, f"weights are left out: {error}"
    index, k = StoredIndex(ranks.searched), int(expand["k"])
    numbers = np.array(queries, dtype=np.int64)
    own = None if ranks.own_rows is None else ranks.own_rows[numbers]
    found = _found(ranks, plain, numbers, min(method.depth(k), candidates(index, own)), own)
    if index.rows > LARGEST_SEARCH and (found is None or method.negatives):
        return None, (
            f"weights are left out: {index.rows:,} rows would be searched again; give --against ranks "
            f"without expansion, of {method.depth(k)} results or more"
        )
    xq, space = ranks.queries.gather(numbers).astype(np.float32), adaptation_for(ranks.searched[0], ranks.queries)
    done = expand_queries(index, xq if space is None else space.apply(xq), method, k, found=found, exclude=own)
    # Beyond k stand rows that a method only compares with: they have a share in the sum, but were not weighed.
    rows, weights = done.rows[:, 1 : 1 + k], done.weights[:, 1 : 1 + k]
    return {
        query: {int(row): float(weight) for row, weight in zip(mine, given) if row >= 0}
        for query, mine, given in zip(queries, rows.tolist(), weights.tolist())
    }, ""


def _method(ranks: JudgedRanks, expand: Mapping[str, object]) -> Method:
    """The method that the ranks were made with, its model opened where it was."""
    params = dict(expand["params"])  # type: ignore[call-overload]
    model = ranks.ranks.manifest.inputs.get("model")
    if model is not None:
        digest = read_manifest(open_place(model["uri"]), "model").digest
        if digest != model["digest"]:
            raise LattqeError(f"the model at {model['uri']} has changed")
        params["model"] = model["uri"]
    return create(str(expand["method"]), **params)


def _found(
    ranks: JudgedRanks, plain: JudgedRanks | None, queries: np.ndarray, depth: int, own: np.ndarray | None
) -> Found | None:
    """The neighbors of the queries as the plain ranks list them, where these are what was expanded from.

    own (nq,): the row of each query that is itself in the database, and listed there.
    """
    if plain is None or plain.ranks.manifest.config.get("expand") or plain.ranks.k < depth + (own is not None):
        return None
    if [each.digest for each in (*plain.searched, plain.queries)] != [
        each.digest for each in (*ranks.searched, ranks.queries)
    ]:
        return None
    I, D = plain.ranks.gather(queries)
    return (D, I) if own is None else without_own(D, I, own)
