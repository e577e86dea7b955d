"""Variants of a training with one part taken away or changed, for tables such as the paper's Table 2."""

from lattqe.training.config import TrainingConfig

# Table 2 of the paper, rows (ii) to (vi).
TABLE_2: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false"],
    "no-position": ["network.positional=false"],
    "no-visual": ["network.visual=false", "network.positional_start=small"],
    "no-auxiliary": ["network.auxiliary=none", "auxiliary=0"],
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


def variants(config: TrainingConfig) -> dict[str, list[str]]:
    """The variants that make sense for a configuration: name -> changes, as `--set` takes them."""
    return RELATIONAL if config.network.relational else TABLE_2
