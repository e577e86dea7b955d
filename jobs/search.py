"""Find the best rows of a database for each query, expanded if asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    Json,
    command,
    human_bytes,
    note_approximate,
    print_json,
    progress_bar,
    run,
    screen,
    show_facts,
    show_table,
)
from jobs.index import NAMES, method_options, method_params
from jobs.plan import Address, Assume, Cache, Plan, on_ray, setting, tell
from lattqe.cost.work import PART_QUERIES
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    import numpy as np

    from lattqe.adaptation import Adaptation
    from lattqe.cost import Work
    from lattqe.cost.plans import Placement
    from lattqe.expansion.base import Method
    from lattqe.search import Index
    from lattqe.store import FeatureSet, Pending

# Options of this verb alone.
Nqe = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Neighbors to expand from; default: the model's (for an augmented index, its number with DBA), or the "
        "paper's for the method.",
    ),
]
Distractors = Annotated[str | None, typer.Option(help="A feature set whose rows are appended to the database's.")]
Shards = Annotated[
    int | None,
    typer.Option(min=1, help="Shards on Ray; default: none up to 50,000 rows, else one per GPU, or by CPUs and rows."),
]


@method_options
def main(
    database: Annotated[str, typer.Argument(help="The feature set to search: a folder or s3://bucket/prefix.")],
    queries: Annotated[str, typer.Argument(help="The feature set of the queries.")],
    to: Annotated[str, typer.Option("--to", help="Where the ranks go.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Results per query.")] = 100,
    expand: Annotated[str | None, typer.Option(help=f"Expand queries: {NAMES}.")] = None,
    nqe: Nqe = None,
    params: dict[str, Any] | None = None,
    distractors: Distractors = None,
    workers: Shards = None,
    address: Address = None,
    cache: Cache = None,
    plan: Plan = False,
    assume: Assume = None,
    json: Json = False,
) -> None:
    """Find the best rows of a database for each query, exactly.

    Example: lattqe search index queries -k 100 --expand lattqe --model model --to ranks
    """
    from lattqe.duplicates import own_rows
    from lattqe.search.rows import check_k

    sources, asked = opened_sets(database, distractors, queries, cache)
    expansion = make_expansion(expand, nqe, params or {}, sources[0])
    rows = sum(each.rows for each in sources)
    check_k(k, rows)
    note_approximate(*sources)
    if (where := setting(plan, assume, rows, workers, address, cache)) is not None:
        tell([planned(sources, asked, k, expansion, where)], where, not sources[0].place.is_local, json)
        return
    note_few_rows(rows, k, expansion)
    space = space_of(sources, asked)
    pending = begin_ranks(to, k, sources, asked, expansion)
    facts: dict[str, Any] = {"ranks": to, "queries": asked.rows, "k": k}
    if pending.missing():
        with open_index(sources, workers, address, cache, ids=expansion is not None) as (index, placed):
            if expansion is not None:
                expansion = replace(expansion, own=own_rows(sources[0], asked, getattr(index, "find_ids", None)))
                facts["queries_in_database"] = expansion.inside
            show_plan(index, placed, asked, k, expansion, pending, space is not None)
            facts |= answer(index, asked, k, expansion, pending, space)
            if (memory := getattr(index, "memory", None)) is not None:  # of shards: this process holds nothing else
                facts |= memory(asked.rows, k if expansion is None else max(k, expansion.method.depth(expansion.k)))
    facts["digest"] = pending.finish().digest
    if json:
        print_json(facts)
    show_facts(f"ranks in {to}", facts)


def opened_sets(
    database: str, distractors: str | None, queries: str, cache: str | None
) -> "tuple[list[FeatureSet], FeatureSet]":
    """The sets that are searched and the queries; sets of different widths are refused."""
    from lattqe.store import FeatureSet

    sources = [FeatureSet.open(uri, cache) for uri in (database, distractors) if uri is not None]
    asked = FeatureSet.open(queries, cache)
    for other in (asked, *sources[1:]):
        if other.dim != sources[0].dim:
            raise LattqeError(
                f"{other.uri} has {other.dim} dimensions and {database} {sources[0].dim}: use features of one extractor"
            )
    return sources, asked


def note_few_rows(rows: int, k: int, expansion: "Expansion | None") -> None:
    """Say what becomes of lists that are longer than the database."""
    if k > rows:
        screen.print(f"note: k = {k:,} is more than the {rows:,} rows: lists are padded", markup=False, soft_wrap=True)
    if expansion is not None and expansion.k > rows:
        note = f"note: nQE = {expansion.k:,} is more than the {rows:,} rows: all of them are weighed"
        screen.print(note, markup=False, soft_wrap=True)


def space_of(sources: "list[FeatureSet]", asked: "FeatureSet") -> "Adaptation | None":
    """What queries go through before they are compared; sets of different spaces are refused."""
    if not any("adaptation" in each.manifest.inputs for each in (asked, *sources)):
        return None  # without importing what only augmentation needs

    from lattqe.augmentation.recipe import ADAPTATION, adaptation_for

    database = sources[0]
    for other in sources[1:]:
        if adaptation_for(database, other) is not None:
            raise LattqeError(
                f"{database.uri} is adapted to its collection, {other.uri} is not: adapt it first, with `lattqe whiten "
                f"apply {other.uri} --whitening {database.uri.rstrip('/')}/{ADAPTATION} --to …`"
            )
    return adaptation_for(database, asked)


def planned(
    sources: "list[FeatureSet]", asked: "FeatureSet", k: int, expansion: "Expansion | None", where: "Placement"
) -> "Work":
    """What the search takes."""
    from lattqe.cost import plans
    from lattqe.cost.augment import weighing_of

    rows, dim = sum(each.rows for each in sources), sources[0].dim
    weighs = None if expansion is None else weighing_of(expansion.method, expansion.k, dim, rows, again=True)
    return plans.search([plans.PlannedRows.of(each) for each in sources], plans.PlannedRows.of(asked), k, where, weighs)


@contextmanager
def open_index(
    sources: "list[FeatureSet]", workers: int | None, address: str | None, cache: str | None, ids: bool
) -> "Iterator[tuple[Index, dict[str, str]]]":
    """The rows of all sources as one index, in this process while there are few, else in shards on Ray; and where.

    ids: shards can look up ids, too.
    """
    from cluster import runs_here

    if runs_here(sum(each.rows for each in sources), workers, address):
        from lattqe.device import gpu_or_none
        from lattqe.search.index import StoredIndex

        yield StoredIndex(sources, gpu_or_none()), {"where": "in this process (--workers or --address use Ray)"}
        return
    with on_ray(address):
        from cluster.shards import ShardedIndex

        with ShardedIndex([each.uri for each in sources], workers, cache=cache, ids=ids) as index:
            bundle = ", ".join(f"{amount:g} {name}" for name, amount in index.bundle.items())
            yield (
                index,
                {
                    "where": f"{index.shards} shards of {human_bytes(index.shard_bytes)} on Ray",
                    "each shard has": bundle,
                },
            )


@dataclass(frozen=True)
class Expansion:
    """How queries are expanded: the method, its neighbors, and the digest of its model."""

    method: "Method"
    k: int
    inputs: dict[str, dict[str, str]]
    chosen: str  # where k comes from, for the plan
    own: "np.ndarray | None" = None  # (nq,) the row of each query that is itself in the database, -1 for the others

    @property
    def inside(self) -> int:
        """How many queries are rows of the database, and must not be their own neighbors."""
        return 0 if self.own is None else int((self.own >= 0).sum())

    @property
    def described(self) -> str:
        """For the plan."""
        own = f"; {self.inside:,} queries are rows of the database, never their own neighbors" if self.inside else ""
        return f"{self.method.name} from {self.k} neighbors ({self.chosen}){own}"

    @property
    def config(self) -> dict[str, Any]:
        """What the ranks remember of it; the model is among the inputs."""
        params = {name: value for name, value in self.method.params.items() if name != "model"}
        return {"method": self.method.name, "k": self.k, "params": params}


def make_expansion(
    name: str | None, nqe: int | None, given: dict[str, Any], database: "FeatureSet"
) -> Expansion | None:
    """The expansion that the options ask for; options without one, and models that do not fit, are refused by name."""
    if name is None:
        alone = [*(["nqe"] if nqe is not None else []), *given]
        if alone:
            raise LattqeError(f"--{alone[0]} needs --expand: name the method, as in --expand alphaqe")
        return None

    from lattqe.augmentation.recipe import is_augmented
    from lattqe.device import pick_device
    from lattqe.expansion import create
    from lattqe.expansion.attention import model_inputs

    method = create(name, **method_params(name, given))
    method.check_width(database.dim, f"features in {database.uri}")
    method.check_device(pick_device())
    augmented = is_augmented(database)
    k = nqe or method.suggested_k(dba=False, augmented=augmented)
    method.check_k(k)
    chosen = "as asked" if nqe else method.origin_of_k(augmented)
    return Expansion(method, k, model_inputs(method.params), chosen)


def begin_ranks(
    to: str, k: int, sources: "list[FeatureSet]", asked: "FeatureSet", expansion: Expansion | None
) -> "Pending":
    """Claim the destination, or join an earlier run of the same search."""
    from lattqe.store import Pending

    inputs = {"database": sources[0].as_input(), "queries": asked.as_input()}
    if len(sources) > 1:
        inputs["distractors"] = sources[1].as_input()
    if expansion is not None:
        inputs |= expansion.inputs
    part_rows = [min(PART_QUERIES, asked.rows - start) for start in range(0, asked.rows, PART_QUERIES)]
    config = {"job": "search", "k": k, "expand": None if expansion is None else expansion.config}
    return Pending.begin(to, "ranks", {"k": k}, part_rows, config=config, inputs=inputs)


def show_plan(
    index: "Index",
    where: dict[str, str],
    asked: "FeatureSet",
    k: int,
    expansion: Expansion | None,
    pending: "Pending",
    adapted: bool,
) -> None:
    """Print what is going to happen."""
    rounds = 1 if expansion is None else 2
    parts, missing = len(pending.part_rows), len(pending.missing())
    show_table(
        "plan",
        {
            "database": f"{index.rows:,} × {index.dim}",
            **where,
            "queries": f"{asked.rows:,}, k = {k}, {parts - missing} of {parts} parts done",
            **({"space": "adapted to the collection: queries are adapted as its rows were"} if adapted else {}),
            "expansion": "none" if expansion is None else expansion.described,
            "products": f"{2e-12 * rounds * asked.rows * index.rows * index.dim:.3g} TFLOP",
        },
    )


def answer(
    index: "Index",
    asked: "FeatureSet",
    k: int,
    expansion: Expansion | None,
    pending: "Pending",
    space: "Adaptation | None" = None,
) -> dict[str, Any]:
    """Search the missing parts and publish each; return the seconds it took. space: what queries go through first."""
    from lattqe.expansion.rows import expand_queries
    from lattqe.search.rows import Clock
    from lattqe.store import ranks_table

    clock, missing = Clock(), pending.missing()
    done = asked.rows - sum(pending.part_rows[part] for part in missing)
    with progress_bar("queries", asked.rows, done) as bar, clock("all"):
        for part in missing:
            start, stop = part * PART_QUERIES, min((part + 1) * PART_QUERIES, asked.rows)
            xq = asked.read(start, stop)
            if space is not None:
                xq = space.apply(xq)
            if expansion is not None:
                own = None if expansion.own is None else expansion.own[start:stop]
                with clock("expanding"):
                    xq = expand_queries(index, xq, expansion.method, expansion.k, exclude=own).vectors
            with clock("searching"):
                scores, ids = index.search(xq, k)
            with clock("writing"):
                # As Arrow's own texts: of Python's it would make a column by importing pandas, for a second.
                pending.publish(part, ranks_table(asked.table(start, stop).column("id"), ids, scores))
            bar.advance(stop - start)
    seconds = {name: round(spent, 2) for name, spent in clock.seconds.items()}
    total = seconds.pop("all")
    return {
        "seconds": total,
        "queries_per_second": round((asked.rows - done) / max(total, 1e-9), 1),
        "spent": seconds,
        "shards": getattr(index, "shards", 0),
        "shard_failures": getattr(index, "failures", 0),
    }


app = command(main)

if __name__ == "__main__":
    run(app)
