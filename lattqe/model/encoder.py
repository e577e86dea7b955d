"""What networks are made of: tokens, the encoders of Vaswani et al. that read them, and heads that make weights.

A token is what an item carries of its vector and its place. The attention may be biased by the similarities of the
list's vectors. A weight is the cosine with the query's token, and what may be done to it.

Relational tokens carry relations instead of content: what a list says of itself, whatever its vectors depict. Content
memorises the training classes; similarities, ranks and how the neighbors relate to each other mean the same in every
collection. A last token stands for the background: the mean of a deeper list, the paper's {d}⁻, whose direction
relevant and irrelevant neighbors have in common.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.model.network import LAttQEConfig

POSITION_SCALE = {"zeros": 0.0, "small": 0.02, "normal": 1.0}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu}
# A power below 1 has an infinite slope at 0; this is where the slope stops growing.
SMALLEST_COSINE = 1e-4
FEATURES = 14
HEAD_OF_LIST = 8  # neighbors that are mostly right: likeness to them is the best single sign of relevance


@dataclass(frozen=True)
class EncoderInputs:
    """What the encoders read: tokens (n, t, W), valid (n, t) bool, relations.

    relations: None, or the cosines (n, t, t) of the items' vectors, or these and the cosines after taking the
    background away, (2, n, t, t).
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    relations: torch.Tensor | None


class Tokens(nn.Module):
    """token_i = content(d_i) + context(rank i, similarity of d_i to the query); each term is optional."""

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__()
        self.config = config
        width = config.token_width
        self.content_dropout = nn.Dropout(config.content_dropout)
        self.projection = nn.Linear(config.dim, width, bias=False) if config.visual and config.width else None
        self.positions = nn.Parameter(torch.zeros(1 + config.max_k, width)) if config.positional else None
        self.similarity = nn.Linear(1, width) if config.similarity else None
        if self.positions is not None and not self.positions.is_meta:  # drawing nothing would import sympy: 2 s
            nn.init.normal_(self.positions, std=POSITION_SCALE[config.positional_start])

    def forward(self, items: torch.Tensor, valid: torch.Tensor) -> EncoderInputs:
        """Items (n, t, D) with row 0 the query and valid (n, t) bool, to what the encoders read."""
        tokens = self.content(items) + self.context(items)
        return EncoderInputs(tokens.expand(*items.shape[:2], -1), valid, self.relations(items))

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


class Encoder(nn.Module):
    """Self-attention, then two fully connected layers, each with a residual connection and LayerNorm.

    Without attention only the second half remains: items no longer see each other.
    """

    def __init__(self, config: "LAttQEConfig") -> None:
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

    def forward(
        self, x: torch.Tensor, valid: torch.Tensor, relations: torch.Tensor | None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens (n, t, W) to tokens (n, t, W); of tokens at certain places (m,) of n * t alone, (m, W) to (m, W)."""
        if self.has_attention:
            bias = self.attention_bias(valid, relations)
            if self.pre:
                x = x + self.dropout(self.attend(self.norm_attention(x), bias, places))
            else:
                x = self.norm_attention(x + self.dropout(self.attend(x, bias, places)))
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

    def attend(self, x: torch.Tensor, bias: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Multi-head scaled dot-product attention of tokens (n, t, W), or of those at certain places alone."""
        if places is None:
            return self.out(self.mix(self.qkv(x), bias))
        n, t = len(bias), bias.shape[-1]
        return self.out(self.mix(spread(self.qkv(x), places, n, t), bias).view(n * t, -1).index_select(0, places))

    def mix(self, qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """What each item takes from the others: its q, k and v (n, t, 3 W) to (n, t, W)."""
        n, t, width = *qkv.shape[:2], qkv.shape[2] // 3
        q, k, v = qkv.view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        # No dropout of attention weights: Vaswani et al. drop sub-layer outputs only, and it would draw its mask from
        # a generator that training cannot split by query.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(n, t, width)

    def connect(self, x: torch.Tensor) -> torch.Tensor:
        """The two fully connected layers."""
        return self.down(self.dropout(self.activation(self.up(x))))


def _relation_start(config: "LAttQEConfig") -> torch.Tensor:
    """Factors of the similarities: (heads,) zeros; relational (2, heads), half of the heads for each kind.

    Similarities differ by tenths within a list: factors of this size let a head see its nearest few.
    """
    if not config.relational:
        return torch.zeros(config.heads)
    half = config.heads - config.heads // 2
    plain, centred = _evenly(8, 20, half), _evenly(4, 12, config.heads - half)
    return torch.tensor([plain + [0.0] * len(centred), [0.0] * half + centred])


def _evenly(first: float, last: float, count: int) -> list[float]:
    """What torch.linspace gives, which takes a second to import what it needs where shapes alone are asked for."""
    return [first + (last - first) * place / max(count - 1, 1) for place in range(count)]


class Stack(nn.Module):
    """The encoders in turn, each initialised on its own (`nn.TransformerEncoder` would start with equal copies)."""

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__()
        self.encoders = nn.ModuleList(Encoder(config) for _ in range(config.layers))
        # A pre-LN stack ends on a sum that nothing has normalised.
        self.final = nn.LayerNorm(config.token_width) if config.norm == "pre" else nn.Identity()

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        """Transformed tokens (n, t, W); in training those of invalid places may be zeros, for nothing reads them."""
        x, places = inputs.tokens, None
        n, t, width = x.shape
        # In the paper's training half of the places are dropped or padding. A GPU would be waited for to count them.
        if self.training and inputs.relations is None and x.device.type == "cpu":
            places = inputs.valid.flatten().nonzero()[:, 0]
            x = x.reshape(n * t, width).index_select(0, places)
        for encoder in self.encoders:
            x = encoder(x, inputs.valid, inputs.relations, places)
        x = self.final(x)
        return x if places is None else spread(x, places, n, t)


def spread(x: torch.Tensor, places: torch.Tensor, n: int, t: int) -> torch.Tensor:
    """Tokens (m, W) put where they belong among n * t places, zeros elsewhere: (n, t, W)."""
    return x.new_zeros(n * t, x.shape[1]).index_copy(0, places, x).view(n, t, -1)


@dataclass(frozen=True)
class Output:
    """What the network says of n lists of t = 1 + k items.

    weights (n, t): of the original vectors, 0 on padding; column 0 is the query's.
    auxiliary (n, k): logits of 'this neighbor is relevant', or None; for training only.
    cosine (n, t): of q̃ and d̃_i. transformed (n, t, W): the tokens q̃, d̃_1 … d̃_k.
    """

    weights: torch.Tensor
    auxiliary: torch.Tensor | None
    cosine: torch.Tensor
    transformed: torch.Tensor


class Head(nn.Module):
    """w_i = cos(q̃, d̃_i), or its learned power; for database rows softmax(w / T) with a learned temperature."""

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__()
        self.clamp, self.direct = config.clamp_negative, config.direct
        # Logarithms, so that whatever the optimiser does, powers and temperatures stay above zero.
        start = config.power_start
        self.log_power = nn.Parameter(torch.tensor(math.log(start))) if start is not None else None
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.temperature_start)))
        self.linear = nn.Linear(config.token_width, 1) if config.auxiliary == "linear" else None
        # Starts where a cosine of one half is undecided.
        self.scale_bias = nn.Parameter(torch.tensor([5.0, -2.5])) if config.auxiliary == "cosine" else None

    @property
    def temperature(self) -> torch.Tensor:
        """T of the softmax for database rows."""
        return self.log_temperature.exp()

    def forward(self, transformed: torch.Tensor, valid: torch.Tensor, dba: bool = False) -> Output:
        """Weights of transformed (n, t, W) with valid (n, t) bool; `dba` takes the tempered softmax."""
        unit = F.normalize(transformed, dim=-1)
        cosine = (unit @ unit[:, 0, :, None])[..., 0]
        weights = cosine
        if self.log_power is not None:
            weights = cosine.sign() * cosine.abs().clamp(min=SMALLEST_COSINE) ** self.log_power.exp()
        return Output(self.finish(weights, valid, dba), self.classify(transformed, cosine), cosine, transformed)

    def finish(self, weights: torch.Tensor, valid: torch.Tensor, dba: bool) -> torch.Tensor:
        """Weights (n, t) without padding, clamped if configured; `dba`: the tempered softmax of them."""
        if self.direct:  # each counts as one
            return valid.to(weights.dtype)
        if self.clamp:
            weights = weights.clamp(min=0)
        if dba:
            return (weights / self.temperature).masked_fill(~valid, -torch.inf).softmax(dim=1)
        return weights.masked_fill(~valid, 0)

    def classify(self, transformed: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor | None:
        """Logits (n, k) of 'this neighbor is relevant', from the tokens or from the cosine."""
        if self.linear is not None:
            return self.linear(transformed[:, 1:])[..., 0]
        if self.scale_bias is not None:
            return self.scale_bias[0] * cosine[:, 1:] + self.scale_bias[1]
        return None


@dataclass(frozen=True)
class Relations:
    """What n lists of t = 1 + k items, and their background, say of themselves.

    features (n, t + 1, FEATURES): of each token, the background's last; valid (n, t + 1) bool; cosines and centred
    (n, t + 1, t + 1): similarities of the tokens' vectors, as they are and after taking the background away.
    """

    features: torch.Tensor
    valid: torch.Tensor
    cosines: torch.Tensor
    centred: torch.Tensor

    @property
    def similarity(self) -> torch.Tensor:
        """To the query, (n, t + 1)."""
        return self.features[..., 0]

    @property
    def standard(self) -> torch.Tensor:
        """Similarity to the query, standardised within the list and halved, (n, t + 1)."""
        return self.features[..., 4]


def background_share(valid: torch.Tensor, depth: int) -> torch.Tensor:
    """The share (n, t) of each item in the background: equal among the first `depth` valid neighbors."""
    share = valid.float()
    share[:, 0] = 0
    share[:, 1 + depth :] = 0
    return share / share.sum(1, keepdim=True).clamp(min=1)


def relate(items: torch.Tensor, valid: torch.Tensor, background: torch.Tensor, ranks: bool = True) -> Relations:
    """Relations of items (n, t, D), row 0 the query, with valid (n, t) bool and background (n, D)."""
    t = items.shape[1]
    near = valid.float()
    near[:, 0] = 0
    count = near.sum(1, keepdim=True).clamp(min=1)
    vectors = torch.cat([items, F.normalize(background, dim=-1)[:, None]], dim=1)
    cosines = vectors @ vectors.transpose(1, 2)
    apart = F.pad(F.normalize(items - background[:, None], dim=-1, eps=1e-4), (0, 0, 0, 1))
    centred = apart @ apart.transpose(1, 2)

    similarity = cosines[:, 0]
    mean = (similarity[:, :t] * near).sum(1, keepdim=True) / count
    spread = (((similarity[:, :t] - mean).square() * near).sum(1, keepdim=True) / count + 1e-6).sqrt()
    first = near[:, : 1 + HEAD_OF_LIST]
    first = first / first.sum(1, keepdim=True).clamp(min=1)
    to_first = torch.einsum("nij,nj->ni", cosines[:, :, : first.shape[1]], first)
    to_list = torch.einsum("nij,nj->ni", cosines[:, :, :t], near) / count
    nearer = torch.einsum("nij,nj->ni", (cosines[:, :, :t] > similarity[..., None]).float(), near) / count
    centred_first = torch.einsum("nij,nj->ni", centred[:, :, : first.shape[1]], first)
    rank = torch.arange(t + 1, device=items.device, dtype=items.dtype)
    every = torch.ones_like(similarity)
    flags = torch.zeros(2, t + 1, device=items.device, dtype=items.dtype)
    flags[0, 0] = flags[1, -1] = 1
    features = torch.stack(
        [
            similarity,
            torch.log1p(rank) / 3 * every * ranks,
            flags[0] * every,
            flags[1] * every,
            ((similarity - mean) / spread).clamp(-3, 3) / 2,
            mean * every,
            5 * spread * every,
            to_list,
            to_first,
            3 * (to_first - cosines[:, :, -1]),
            nearer,  # share of the list that is nearer to it than the query is
            2 * centred[:, 0],
            2 * centred_first,
            (rank / max(t - 1, 1)).clamp(max=1) * every * ranks,
        ],
        dim=-1,
    )
    return Relations(features, F.pad(valid, (0, 1), value=True), cosines, centred)


class RelationalTokens(nn.Module):
    """token_i = mlp(relations of d_i), and content(d_i) if configured."""

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__()
        width = config.token_width
        self.mlp = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width))
        self.content_dropout = nn.Dropout(config.content_dropout)
        self.projection = nn.Linear(config.dim, width, bias=False) if config.visual else None
        self.scale = config.dim**0.5 / 4  # brings unit vectors to the size of the other term

    def forward(self, relations: Relations, items: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
        """Tokens (n, t + 1, W) of the items (n, t, D) and of the background (n, D), last."""
        tokens = self.mlp(relations.features)
        if self.projection is not None:
            vectors = torch.cat([items, F.normalize(background, dim=-1)[:, None]], dim=1)
            tokens = tokens + self.projection(self.content_dropout(vectors)) * self.scale
        return tokens


class SignedHead(Head):
    """Signed weights and the background's share: what two linear maps add to a prior that is a good method itself.

    w_0 = 1, w_i = 0.3 s_i + 0.1 z_i + 0.5 a·x_i with s the similarity to the query and z the same, standardised in the
    list; x̂ = norm(norm(Σ w_i d_i) - β b) with β = 0.6 + 0.5 c·x_b for the background b.
    """

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__(config)
        self.weight = nn.Linear(config.token_width, 1)
        self.beta = nn.Linear(config.token_width, 1) if config.background else None
        for layer in (self.weight, self.beta):
            if layer is not None:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def signed(self, tokens: torch.Tensor, relations: Relations, dba: bool = False) -> Output:
        """Weights (n, t) of the items before the background is taken away; tokens (n, t + 1, W), background last."""
        learned = self.weight(tokens[:, 1:-1])[..., 0]
        prior = 0.3 * relations.similarity[:, 1:-1] + 0.2 * relations.standard[:, 1:-1]
        raw = F.pad(0.5 * learned + prior, (1, 0), value=1.0)
        weights = self.finish(raw, relations.valid[:, :-1], dba)
        return Output(weights, self.classify(tokens[:, :-1], raw), raw, tokens[:, :-1])

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """How much of the background (n,) is taken away."""
        if self.beta is None:
            return tokens.new_zeros(len(tokens))
        return 0.6 + 0.5 * self.beta(tokens[:, -1])[..., 0]
