"""Tokens, what each item carries of its vector and its place, and the encoders of Vaswani et al. that read them.

The attention may be biased by the similarities of the list's vectors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class Encoder(nn.Module):
    """Self-attention, then two fully connected layers, each with a residual connection and LayerNorm.

    Without attention only the second half remains: items no longer see each other.
    """

    def __init__(self, config: LAttQEConfig) -> None:
        super().__init__()
        width = config.token_width
        self.heads = config.heads
        self.pre = config.norm == "pre"
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)
        if config.attention:
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
            self.norm_attention = nn.LayerNorm(width)
            nn.init.xavier_uniform_(self.qkv.weight)
            nn.init.zeros_(self.qkv.bias)
            nn.init.zeros_(self.out.bias)
        self.has_attention = config.attention
        self.relation = nn.Parameter(_relation_start(config)) if config.relation_bias else None
        self.up = nn.Linear(width, config.hidden)
        self.down = nn.Linear(config.hidden, width)
        self.norm_ffn = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, valid: torch.Tensor, relations: torch.Tensor | None) -> torch.Tensor:
        """Tokens (n, t, W) to tokens (n, t, W)."""
        if self.has_attention:
            bias = self.attention_bias(valid, relations)
            if self.pre:
                x = x + self.dropout(self.attend(self.norm_attention(x), bias))
            else:
                x = self.norm_attention(x + self.dropout(self.attend(x, bias)))
        if self.pre:
            return x + self.dropout(self.connect(self.norm_ffn(x)))
        return self.norm_ffn(x + self.dropout(self.connect(x)))

    def attention_bias(self, valid: torch.Tensor, relations: torch.Tensor | None) -> torch.Tensor:
        """Mask (n, 1, 1, t) bool of the items to attend to, or bias (n, heads, t, t) of the logits."""
        mask = valid[:, None, None, :]
        if self.relation is None or relations is None:
            return mask
        if relations.dim() == 3:
            bias = self.relation[:, None, None] * relations[:, None]
        else:
            plain, centred = self.relation[:, :, None, None]
            bias = plain * relations[0][:, None] + centred * relations[1][:, None]
            # The bias would draw all attention to the item itself, which the residual connection brings anyway.
            mask = mask & ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        return bias.masked_fill(~mask, -torch.inf)

    def attend(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Multi-head scaled dot-product attention of tokens (n, t, W)."""
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        # No dropout of attention weights: Vaswani et al. drop sub-layer outputs only, and it would draw its mask from
        # a generator that training cannot split by query.
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))

    def connect(self, x: torch.Tensor) -> torch.Tensor:
        """The two fully connected layers."""
        return self.down(self.dropout(self.activation(self.up(x))))


def _relation_start(config: LAttQEConfig) -> torch.Tensor:
    """Factors of the similarities: (heads,) zeros; relational (2, heads), half of the heads for each kind.

    Similarities differ by tenths within a list: factors of this size let a head see its nearest few.
    """
    if not config.relational:
        return torch.zeros(config.heads)
    half = config.heads - config.heads // 2
    factors = torch.zeros(2, config.heads)
    factors[0, :half], factors[1, half:] = torch.linspace(8, 20, half), torch.linspace(4, 12, config.heads - half)
    return factors


class Stack(nn.Module):
    """The encoders in turn, each initialised on its own (`nn.TransformerEncoder` would start with equal copies)."""

    def __init__(self, config: LAttQEConfig) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(Encoder(config) for _ in range(config.layers))
        # A pre-LN stack ends on a sum that nothing has normalised.
        self.final = nn.LayerNorm(config.token_width) if config.norm == "pre" else nn.Identity()

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Transformed tokens (n, t, W)."""
        x = inputs.tokens
        for encoder in self.encoders:
            x = encoder(x, inputs.valid, inputs.relations)
        return self.final(x)
