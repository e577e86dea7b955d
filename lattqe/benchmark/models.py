"""What a trained model says about how it wants to be used."""

import json
from typing import Any

from lattqe.benchmark.spec import LABELS, Ablation, Method
from lattqe.errors import LattqeError
from lattqe.store import load_model, open_place

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


def trained_ablations(folder: str) -> tuple[Ablation, ...]:
    """The variants that `lattqe ablate --to folder` trained, each with the nQE that validation chose for it."""
    place = open_place(folder)
    if not place.exists("ablations.json"):
        raise LattqeError(f"{folder} has no ablations.json: give the folder of a finished lattqe ablate")
    try:
        names = list(json.loads(place.read("ablations.json")))
    except ValueError as error:
        raise LattqeError(f"{folder}/ablations.json is not valid JSON ({error}): run lattqe ablate again") from error
    models = {name: f"{folder.rstrip('/')}/{name}" for name in names if name and "/" not in name and ".." not in name}
    return tuple(Ablation(name, model, chosen_neighbors(model)["nqe"]) for name, model in models.items())
