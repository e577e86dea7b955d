"""What a trained model says about how it wants to be used."""

from typing import Any

from lattqe.benchmark.spec import LABELS, Method
from lattqe.errors import LattqeError
from lattqe.store import load_model

NUMBERS = ("nqe", "ndba", "nqe_with_dba")


def chosen_neighbors(model: str) -> dict[str, int]:
    """The nQE, nDBA and nQE with DBA that training chose on its validation sets and stored with the model."""
    metrics: dict[str, Any] = load_model(model)[2]
    chosen = metrics.get("chosen", {})
    if not all(isinstance(chosen.get(name), int) and chosen[name] > 0 for name in NUMBERS):
        raise LattqeError(f"{model} does not say which numbers of neighbors its training chose: give nqe, ndba and "
                          "nqe_with_dba yourself")
    return {name: chosen[name] for name in NUMBERS}


def as_trained(model: str, label: str = LABELS["lattqe"]) -> Method:
    """LAttQE with the numbers of neighbors that its training chose."""
    chosen = chosen_neighbors(model)
    return Method("lattqe", label, "model", (chosen["nqe"],), (chosen["ndba"],), (chosen["nqe_with_dba"],),
                  {"model": (model,)})
