"""What the paper found, and whether it appears in a run: said either way."""

from collections.abc import Mapping, Sequence
from typing import Any


def findings(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The orderings of the paper's Table 3 as far as a run's rows can show them: `claim`, `holds`, `detail`.

    All are about the mean over the table's columns.
    """
    by_kind: dict[str, list[Mapping[str, Any]]] = {"none": [], "qe": [], "dba+qe": []}
    for row in table:
        by_kind[row["kind"]].append(row)
    plain, queries, both = by_kind["none"][0], by_kind["qe"], by_kind["dba+qe"]
    found = [_all("every query expansion is better than none", queries, lambda row: row["mean"] > plain["mean"])]
    found += _leads("LAttQE is the best query expansion", queries)
    alone = {row["method"]: row["mean"] for row in queries}
    if both:
        found.append(_all("every method gains by augmenting the database too", both,
                          lambda row: row["mean"] > alone[row["method"]]))
        found += _leads("LAttDBA + LAttQE is the best of all", [*both, *queries])
    return found


def _all(claim: str, rows: Sequence[Mapping[str, Any]], test: Any) -> dict[str, Any]:
    failing = [row["label"] for row in rows if not test(row)]
    return {"claim": claim, "holds": not failing, "detail": f"not {', '.join(failing)}" if failing else ""}


def _leads(claim: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whether LAttQE's best row leads; nothing where there are no rivals, or it was not measured."""
    ours = [row for row in rows if row["method"] == "lattqe"]
    rivals = [row for row in rows if row["method"] != "lattqe"]
    if not ours or not rivals:
        return []
    best, rival = ours[0], max(rivals, key=lambda row: row["mean"])
    detail = f"{best['label']} {best['mean']:.1f}, {rival['label']} {rival['mean']:.1f}"
    return [{"claim": claim, "holds": best["mean"] > rival["mean"], "detail": detail}]
