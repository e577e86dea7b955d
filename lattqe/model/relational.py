"""Tokens that carry relations instead of content: what a list says of itself, whatever its vectors depict.

Content memorises the training classes; similarities, ranks and how the neighbors relate to each other mean the same in
every collection. A last token stands for the background: the mean of a deeper list, the paper's {d}⁻, whose direction
relevant and irrelevant neighbors have in common.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.model.config import LAttQEConfig
from lattqe.model.head import Head, Output

FEATURES = 14
HEAD_OF_LIST = 8  # neighbors that are mostly right: likeness to them is the best single sign of relevance


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
    """token_i = mlp(relations of d_i), and content(d_i) where that is wanted too."""

    def __init__(self, config: LAttQEConfig) -> None:
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

    def __init__(self, config: LAttQEConfig) -> None:
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
