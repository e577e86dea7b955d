"""Find the best rows of a database for each query: search, expand the query if asked to, search again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, show_table
from jobs.methods import NAMES, method_options, method_params
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.shards import ShardedIndex
    from lattqe.expansion.base import Method
    from lattqe.store import FeatureSet, Pending

PART_QUERIES = 8192  # one part of the ranks, and the most that a death can cost


@method_options
def main(
    database: Annotated[str, typer.Argument(help="The feature set to search: a folder or s3://bucket/prefix.")],
    queries: Annotated[str, typer.Argument(help="The feature set of the queries.")],
    to: Annotated[str, typer.Option("--to", help="Where the ranks go.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Rows for each query.")] = 100,
    expand: Annotated[str | None, typer.Option(help=f"Expand queries: {NAMES}.")] = None,
    nqe: Annotated[int | None, typer.Option(min=1, help="Neighbors to expand from. [default: the model's, or the "
                                                        "paper's for the method]")] = None,
    params: dict[str, Any] | None = None,
    distractors: Annotated[str | None, typer.Option(help="A feature set whose rows follow the database's.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Shards. [default: one for each GPU, or by CPUs and "
                                                            "rows]")] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    cache: Annotated[str | None, typer.Option(help="Node-local folder for rows that live on S3.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Find the best rows of a database for each query, exactly.

    Example: lattqe search index queries -k 100 --expand lattqe --model model --to ranks
    """
    from cluster.session import ray_session
    from cluster.shards import ShardedIndex
    from lattqe.store import FeatureSet

    sources = [FeatureSet.open(uri) for uri in (database, distractors) if uri is not None]
    asked = FeatureSet.open(queries, cache)
    if asked.dim != sources[0].dim:
        raise LattqeError(f"{queries} has {asked.dim} dimensions and {database} {sources[0].dim}: use one extractor")
    expansion = make_expansion(expand, nqe, params or {})
    if expansion is not None:
        expansion.method.check_width(asked.dim, f"features in {database}")
    pending = begin_ranks(to, k, sources, asked, expansion)
    missing = pending.missing()
    facts: dict[str, Any] = {"ranks": to, "queries": asked.rows, "k": k}
    if missing:
        with ray_session(address), ShardedIndex([each.uri for each in sources], workers, cache=cache) as index:
            show_plan(index, asked, k, expansion, len(missing), len(pending.part_rows))
            facts |= answer(index, asked, k, expansion, pending, missing)
    facts["digest"] = pending.finish().digest
    if json:
        print_json(facts)
    show_table(f"ranks in {to}", facts)


@dataclass(frozen=True)
class Expansion:
    """How queries are expanded: the method, its neighbors, and the digest of its model."""

    method: "Method"
    k: int
    inputs: dict[str, dict[str, str]]

    @property
    def config(self) -> dict[str, Any]:
        """What the ranks remember of it; the model is among the inputs."""
        params = {name: value for name, value in self.method.params.items() if name != "model"}
        return {"method": self.method.name, "k": self.k, "params": params}


def make_expansion(name: str | None, nqe: int | None, given: dict[str, Any]) -> Expansion | None:
    """The expansion that the options ask for; options without one are refused by name."""
    from lattqe.expansion import create
    from lattqe.store import open_place, read_manifest

    if name is None:
        alone = [*(["nqe"] if nqe is not None else []), *given]
        if alone:
            raise LattqeError(f"--{alone[0]} needs --expand: name the method, as in --expand alphaqe")
        return None
    params = method_params(name, given)
    method = create(name, **params)
    inputs = {}
    if "model" in params:
        place = open_place(params["model"])
        inputs["model"] = {"uri": place.uri, "digest": read_manifest(place, "model").digest, "kind": "model"}
    return Expansion(method, nqe or method.suggested_k(dba=False), inputs)


def begin_ranks(to: str, k: int, sources: "list[FeatureSet]", asked: "FeatureSet",
                expansion: Expansion | None) -> "Pending":
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


def show_plan(index: "ShardedIndex", asked: "FeatureSet", k: int, expansion: Expansion | None, missing: int,
              parts: int) -> None:
    """Print what is going to happen."""
    rounds = 1 if expansion is None else 2
    show_table("plan", {
        "database": f"{index.rows:,} × {index.dim} in {index.shards} shards of {human_bytes(index.shard_bytes)}",
        "each shard has": ", ".join(f"{amount:g} {name}" for name, amount in index.bundle.items()),
        "queries": f"{asked.rows:,}, k = {k}, {parts - missing} of {parts} parts done",
        "expansion": "none" if expansion is None else f"{expansion.method.name} from {expansion.k} neighbors",
        "products": f"{2e-12 * rounds * asked.rows * index.rows * index.dim:.3g} TFLOP"})


def answer(index: "ShardedIndex", asked: "FeatureSet", k: int, expansion: Expansion | None, pending: "Pending",
           missing: list[int]) -> dict[str, Any]:
    """Search the missing parts and publish each; return the seconds it took."""
    from lattqe.expansion.rows import expand_queries
    from lattqe.search.pairing import Clock
    from lattqe.store import ranks_table

    clock = Clock()
    done = asked.rows - sum(pending.part_rows[part] for part in missing)
    with progress_bar("queries", asked.rows, done) as bar, clock("all"):
        for part in missing:
            start, stop = part * PART_QUERIES, min((part + 1) * PART_QUERIES, asked.rows)
            xq = asked.read(start, stop)
            if expansion is not None:
                with clock("expanding"):
                    xq = expand_queries(index, xq, expansion.method, expansion.k).vectors
            with clock("searching"):
                scores, ids = index.search(xq, k)
            with clock("writing"):
                pending.publish(part, ranks_table(asked.ids(start, stop), ids, scores))
            bar.advance(stop - start)
    seconds = {name: round(spent, 2) for name, spent in clock.seconds.items()}
    total = seconds.pop("all")
    return {"seconds": total, "queries_per_second": round((asked.rows - done) / max(total, 1e-9), 1),
            "spent": seconds, "shards": index.shards, "shard_failures": index.failures}


app = command(main)

if __name__ == "__main__":
    run(app)
