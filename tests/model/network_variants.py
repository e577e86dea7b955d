"""Networks to test: the paper's, the ablations of its Table 2, and the choices it leaves open."""

import dataclasses
from typing import Any

from lattqe.model.network import LAttQEConfig

ABLATIONS: dict[str, dict[str, Any]] = {
    "full": {},
    # Table 2, rows iii to vi
    "no-attention": {"attention": False},
    "no-position": {"positional": False},
    "no-visual": {"visual": False, "positional_start": "small"},
    "no-auxiliary": {"auxiliary": "none"},
    # What the paper does not say
    "pre-norm": {"norm": "pre"},
    "small-position": {"positional_start": "small"},
    "normal-position": {"positional_start": "normal"},
    "clamped": {"clamp_negative": True},
}


def ablation(config: LAttQEConfig, name: str) -> LAttQEConfig:
    """That configuration with one part taken away or changed."""
    return dataclasses.replace(config, **ABLATIONS[name])
