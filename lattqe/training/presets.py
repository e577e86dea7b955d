"""Named configurations, and variants with one part taken away or changed, for tables such as the paper's Table 2."""

from typing import Any

from lattqe.errors import LattqeError
from lattqe.model import LAttQEConfig
from lattqe.training.config import TrainingConfig, changed

PRESETS: dict[str, dict[str, Any]] = {
    # Sections 3.3 and 4.1 of the paper: the defaults, sampled as its code base does.
    "paper": {"pairs": "published", "k_for": "query", "distinct_negatives": True},
    # What wins on photographs of many kinds, and travels: docs/results/training.md has what each choice is worth.
    "photos": {
        "network": {
            "relational": True,
            "relation_bias": True,
            "background": 256,
            "visual": False,
            "width": 64,
            "heads": 4,
            "ffn": 128,
            "layers": 3,
            "max_k": 128,
            "activation": "gelu",
            "dropout": 0.1,
            "auxiliary": "none",
            "temperature_start": 0.4,
        },
        "steps": 3_000,
        "batch": 32,
        "sampler": "worlds",
        "k_min": 8,
        "k_max": 128,
        "k_draw": "log",
        "drop_max": 0.0,
        "positives": 16,
        "contrastive": 0.0,
        "smooth_ap": 1.0,
        "auxiliary": 0.0,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "relation_rate": 20.0,
        "schedule": "cosine",
        "warmup": 50,
        "weight_decay": 1e-2,
        "clip": 1.0,
        "ema": 0.995,
        "temperature_on": "worlds",
        "temperature_steps": 32,
        "temperature_rate": 0.1,
        "validate_every": 500,
        "checkpoint_every": 100,
        "validate_k": (16, 64, 128),
        "choose_qe": (8, 16, 32, 48, 64, 96, 128),
        "choose_dba": (8, 16, 32, 48),
    },
    # The model that ships: any width, any density, hops over the whole graph; docs/model.md has what it is worth.
    "universal": {
        "network": {
            "relational": True,
            "relation_bias": True,
            "background": 256,
            "gated": True,
            "visual": False,
            "width": 64,
            "heads": 4,
            "ffn": 128,
            "layers": 3,
            "max_k": 128,
            "activation": "gelu",
            "dropout": 0.0,
            "auxiliary": "linear",
        },
        "steps": 12_000,
        "batch": 16,
        "sampler": "densities",
        "k_min": 32,
        "k_max": 128,
        "drop_max": 0.0,
        "world_rows": 6_000,
        "clusters": 0.1,
        "ordinary": 0.55,
        "hop_every": 3,
        "hop_rows": 600,
        "hop_k": 40,
        "hops": 6,
        "accumulate": 3,
        "positives": 16,
        "contrastive": 0.0,
        "smooth_ap": 1.0,
        "smooth_ap_spread": 0.15,
        "auxiliary": 0.2,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "relation_rate": 20.0,
        "schedule": "cosine",
        "warmup": 200,
        "weight_decay": 1e-2,
        "clip": 1.0,
        "ema": 0.995,
        "temperature_steps": 0,
        "validate_every": 6_000,
        "checkpoint_every": 300,
        "validate_k": (128,),
        "validate_densities": (1, 2, 4, 8, 16),
        "validate_widths": (128, 512),
        "validate_shift": 1.0,
        "validate_queries": 60,
        "choose_qe": (64, 128),
        "choose_dba": (32,),
        "choose_hops": (4, 8),
        "adapt": True,
    },
    # A relational network small enough for a demonstration: a minute on two cores.
    "demo": {
        "network": {
            "relational": True,
            "relation_bias": True,
            "background": 128,
            "visual": False,
            "width": 32,
            "heads": 4,
            "ffn": 64,
            "layers": 2,
            "max_k": 64,
            "activation": "gelu",
            "dropout": 0.1,
            "auxiliary": "none",
            "temperature_start": 0.4,
        },
        "steps": 300,
        "batch": 32,
        "sampler": "worlds",
        "k_min": 8,
        "k_max": 64,
        "k_draw": "log",
        "drop_max": 0.0,
        "positives": 16,
        "contrastive": 0.0,
        "smooth_ap": 1.0,
        "auxiliary": 0.0,
        "world_rows": 1_500,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "relation_rate": 20.0,
        "schedule": "cosine",
        "warmup": 30,
        "weight_decay": 1e-2,
        "clip": 1.0,
        "ema": 0.98,
        "temperature_on": "worlds",
        "temperature_steps": 16,
        "temperature_rate": 0.1,
        "temperature_rows": 500,
        "validate_every": 100,
        "checkpoint_every": 50,
        "validate_k": (32,),
        "choose_qe": (8, 16, 32, 64),
        "choose_dba": (8, 16, 32),
    },
}


def preset(name: str, dim: int, settings: list[str] | None = None) -> TrainingConfig:
    """A preset for vectors of `dim` columns, with `key=value` and `network.key=value` changes applied."""
    if name not in PRESETS:
        raise LattqeError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
    values = changed(PRESETS[name], settings or [])
    return TrainingConfig(**{**values, "network": LAttQEConfig(**{**values["network"], "dim": dim})})


# Table 2 of the paper, rows (ii) to (vi), and what its text calls weak.
TABLE_2: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false"],
    "no-position": ["network.positional=false"],
    "no-visual": ["network.visual=false", "network.positional_start=small"],
    "no-auxiliary": ["network.auxiliary=none", "auxiliary=0"],
    "direct": ["network.direct=true", "temperature_steps=0"],
}

# The same questions for the relational network, and what else it is made of.
RELATIONAL: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false", "network.relation_bias=false"],
    "no-position": ["network.positional=false"],
    "no-relations": ["network.relation_bias=false"],
    "no-background": ["network.background=0"],
    "positive-weights": ["network.clamp_negative=true"],
    "with-content": ["network.visual=true", "network.content_dropout=0.3"],
    "with-auxiliary": ["network.auxiliary=cosine", "auxiliary=0.1"],
    "contrastive": ["smooth_ap=0", "contrastive=1", "positives=1"],
    "listwise": ["smooth_ap=0", "pull=1", "listwise=0.3"],
    "no-worlds": ["world_classes=1", "world_images=1"],
}


# A gated network cannot do without relations and background; what it learns from can be taken away.
GATED: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false"],
    "no-auxiliary": ["network.auxiliary=none", "auxiliary=0"],
    "contrastive": RELATIONAL["contrastive"],
    "listwise": RELATIONAL["listwise"],
    "no-hops": ["hop_every=0"],
    "no-altered-spaces": ["altered=0"],
}


def variants(config: TrainingConfig) -> dict[str, list[str]]:
    """The variants that make sense for a configuration: name -> changes, as `--set` takes them."""
    if config.network.gated:
        return GATED
    return RELATIONAL if config.network.relational else TABLE_2
