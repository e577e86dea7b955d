"""The encoder of Vaswani et al., with an optional bias of the attention by the similarities of the list's vectors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.model.config import LAttQEConfig
from lattqe.model.tokens import Inputs

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
