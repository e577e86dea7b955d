"""Whether a stored model is what its configuration says."""

import numpy as np

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import load_model


def check_model(uri: str) -> None:
    """The tensors of a network, whitening or adaptation must be finite, and those that its config.json describes."""
    tensors, config, *_ = load_model(uri)
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise CorruptDataError(f"{uri}: tensor {name!r} holds NaN or infinity")
    try:
        if "network" in config:
            from lattqe.model import LAttQE

            LAttQE.load(uri)
        elif config.get("kind") in ("whitening", "adaptation"):
            from lattqe.whitening import load_map

            load_map(uri)
    except LattqeError as error:
        raise CorruptDataError(str(error)) from error
