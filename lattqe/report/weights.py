"""What an expansion gave to each neighbor of a query: weights are not stored with ranks, but they can be made again."""

from collections.abc import Mapping, Sequence

import numpy as np

from lattqe.errors import LattqeError
from lattqe.evaluation.stored import JudgedRanks
from lattqe.expansion import create
from lattqe.expansion.base import Method
from lattqe.expansion.rows import Found, expand_queries
from lattqe.search.index import StoredIndex
from lattqe.store import open_place, read_manifest

# Beyond this many rows neighbors are not searched for again: they come from the plain ranks, or weights are left out.
LARGEST_SEARCH = 50_000

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
    found = _found(ranks, plain, numbers, min(method.depth(k), index.rows))
    if index.rows > LARGEST_SEARCH and (found is None or method.negatives):
        return None, (
            f"weights are left out: {index.rows:,} rows would be searched again; give --against ranks "
            f"without expansion, of {method.depth(k)} results or more"
        )
    done = expand_queries(index, ranks.queries.gather(numbers).astype(np.float32), method, k, found=found)
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
            raise LattqeError(f"the model at {model['uri']} is another one now")
        params["model"] = model["uri"]
    return create(str(expand["method"]), **params)


def _found(ranks: JudgedRanks, plain: JudgedRanks | None, queries: np.ndarray, depth: int) -> Found | None:
    """The neighbors of the queries as the plain ranks list them, where these are what was expanded from."""
    if plain is None or plain.ranks.manifest.config.get("expand") or plain.ranks.k < depth:
        return None
    if [each.digest for each in (*plain.searched, plain.queries)] != [
        each.digest for each in (*ranks.searched, ranks.queries)
    ]:
        return None
    I, D = plain.ranks.gather(queries)
    return D, I
