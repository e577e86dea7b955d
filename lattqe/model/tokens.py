"""From vectors to tokens: what each item carries into the encoders, and how items relate."""

from dataclasses import dataclass

import torch
from torch import nn

from lattqe.errors import LattqeError
from lattqe.model.config import LAttQEConfig

POSITION_SCALE = {"zeros": 0.0, "small": 0.02, "normal": 1.0}


@dataclass(frozen=True)
class Inputs:
    """What the encoders read: tokens (n, t, W), valid (n, t) bool, relations.

    relations: None, or the cosines (n, t, t) of the items' vectors, or these and the cosines after taking the
    background away, (2, n, t, t).
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    relations: torch.Tensor | None


class Tokens(nn.Module):
    """token_i = content(d_i) + context(rank i, similarity of d_i to the query); each term is optional."""

    def __init__(self, config: LAttQEConfig) -> None:
        super().__init__()
        self.config = config
        width = config.token_width
        self.content_dropout = nn.Dropout(config.content_dropout)
        self.projection = nn.Linear(config.dim, width, bias=False) if config.visual and config.width else None
        self.positions = nn.Parameter(torch.zeros(1 + config.max_k, width)) if config.positional else None
        self.similarity = nn.Linear(1, width) if config.similarity else None
        if self.positions is not None:
            nn.init.normal_(self.positions, std=POSITION_SCALE[config.positional_start])

    def forward(self, items: torch.Tensor, valid: torch.Tensor) -> Inputs:
        """Items (n, t, D) with row 0 the query and valid (n, t) bool, to what the encoders read."""
        tokens = self.content(items) + self.context(items)
        return Inputs(tokens.expand(*items.shape[:2], -1), valid, self.relations(items))

    def content(self, items: torch.Tensor) -> torch.Tensor:
        """What an item brings by itself (..., W), whatever list it is in; (W,) zeros for position only."""
        if not self.config.visual:
            return items.new_zeros(self.config.token_width)
        items = self.content_dropout(items)
        return items if self.projection is None else self.projection(items)

    def context(self, items: torch.Tensor) -> torch.Tensor:
        """What its place in the list adds: (t, W), or (n, t, W) with the similarity to the query."""
        t = items.shape[1]
        if t > 1 + self.config.max_k:
            raise LattqeError(f"{t - 1} neighbors, but this network has ranks for {self.config.max_k}: use a smaller k")
        context = items.new_zeros(t, self.config.token_width) if self.positions is None else self.positions[:t]
        if self.similarity is not None:
            context = context + self.similarity(items @ items[:, 0, :, None])
        return context

    def relations(self, items: torch.Tensor) -> torch.Tensor | None:
        """The similarities (n, t, t) of the list's vectors, where the attention is biased by them."""
        return items @ items.transpose(1, 2) if self.config.relation_bias else None
