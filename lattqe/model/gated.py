"""The gated network: one that reads from a list how many of its neighbors are right, and closes its gates to the rest.

The signed weights of `relational` suit lists in which many neighbors are relevant; where one of ten thousand rows is, a
hundred small weights outweigh the query. Here a neighbor's weight is a gate, the square of a probability, which is
nearly closed until something speaks for the neighbor. What speaks is more of the list's shape: the curve of
similarities along all of its depth, and how coherent the list is up to each rank. Rows of a database have gates of
their own and a self-loop, learned through hops over the whole graph: a row without true neighbors stays itself.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.model.encoder import EncoderInputs, Output, Stack

if TYPE_CHECKING:
    from lattqe.model.network import LAttQEConfig

CURVE = (1, 2, 4, 8, 16, 32, 64, 128)  # ranks at which the whole list's similarities are read
FEATURES = 24 + len(CURVE)
HEADS_OF_LIST = (3, 8)  # neighbors that are mostly right: likeness to them is the best single sign of relevance
NO_ROOM = 1e-4  # around the background of a list that is one neighbor, or copies of one: nothing can be read from it
FRIENDS = 3  # nearest other neighbors: a relevant one has several near it, a chance hit none


class WholeList(NamedTuple):
    """What is known of lists beyond the neighbors that are weighed.

    background (n, D): the mean of the list; scores (n, depth): similarities to the query by rank; scored (n, depth)
    bool: False on padding.
    """

    background: torch.Tensor
    scores: torch.Tensor
    scored: torch.Tensor


@dataclass(frozen=True)
class Reading:
    """What n lists of t = 1 + k items, and their background as token t, say of themselves.

    features (n, t + 1, FEATURES), valid (n, t + 1) bool; relations (2, n, t + 1, t + 1): cosines of the tokens'
    vectors, as they are and after taking the background away; standard (n, t + 1): similarity to the query in
    standard deviations of the whole list; mute (n,) bool: lists that are one neighbor, or copies of one.
    """

    features: torch.Tensor
    valid: torch.Tensor
    relations: torch.Tensor
    standard: torch.Tensor
    mute: torch.Tensor


def read(items: torch.Tensor, valid: torch.Tensor, whole: WholeList) -> Reading:
    """Read lists: items (n, t, D), row 0 the query, valid (n, t) bool."""
    (n, t), (background, scores, scored) = items.shape[:2], whole
    neighbors = valid.float()
    neighbors[:, 0] = 0
    count = neighbors.sum(1, keepdim=True).clamp(min=1)
    vectors = torch.cat([items, F.normalize(background, dim=-1)[:, None]], dim=1)
    cosines = vectors @ vectors.transpose(1, 2)
    apart = F.pad(F.normalize(items - background[:, None], dim=-1, eps=1e-4), (0, 0, 0, 1))
    centred = apart @ apart.transpose(1, 2)
    similarity, to_query = cosines[:, 0], centred[:, 0]

    depth = scored.sum(1, keepdim=True).clamp(min=1)
    last = scores.masked_fill(~scored, 2).amin(1, keepdim=True)
    scores = torch.where(scored, scores, last)
    mean = (scores * scored).sum(1, keepdim=True) / depth
    spread = (((scores - mean).square() * scored).sum(1, keepdim=True) / depth + 1e-6).sqrt()
    standard = ((similarity - mean) / spread).clamp(-3, 8)
    curve = ((scores - mean) / spread).clamp(-3, 8) / 4
    height = scores[:, :1] - last

    nearer = torch.einsum("nij,nj->ni", (cosines[:, :, :t] > similarity[..., None]).float(), neighbors)
    few, first = (_likeness(centred, neighbors, m) for m in HEADS_OF_LIST)
    to_first = _likeness(cosines, neighbors, HEADS_OF_LIST[-1])
    others = F.pad(valid, (0, 1), value=False)
    before = torch.ones(t + 1, t + 1, dtype=torch.bool, device=items.device).tril(-1) & others[:, None]
    coherence = (centred * before).sum(2) / before.sum(2).clamp(min=1)
    itself = torch.eye(t + 1, dtype=torch.bool, device=items.device)
    friends = centred.masked_fill(~others[:, None] | itself, -1)[:, :, 1:].topk(min(FRIENDS, t), dim=2).values
    rank = torch.arange(t + 1, device=items.device, dtype=items.dtype)
    flags = torch.zeros(2, t + 1, device=items.device, dtype=items.dtype)
    flags[0, 0] = flags[1, -1] = 1
    features = [
        similarity,
        torch.log1p(rank) / 3,
        flags[0],
        flags[1],
        standard / 4,
        mean,
        5 * spread,
        torch.einsum("nij,nj->ni", cosines[:, :, :t], neighbors) / count,
        to_first,
        3 * (to_first - cosines[:, :, -1]),
        nearer / count,  # share of the list that is nearer to it than the query is
        2 * to_query,
        2 * first,
        (rank / max(t - 1, 1)).clamp(max=1),
        torch.log1p(nearer) / 3,
        2 * coherence,  # likeness to all that rank before it
        2 * few,
        friends[..., 0],
        friends[..., -1],
        (similarity - last) / height.clamp(min=1e-3),
        2 * (friends[..., 0] - to_query),
        torch.log(count) / 5,
        torch.log(depth) / 6,
        height,
        *(curve[:, min(r, scores.shape[1]) - 1, None] for r in CURVE),
    ]
    table = torch.stack([each.expand(n, t + 1) for each in features], dim=-1).clamp(-4, 4)
    mute = 1 - background.square().sum(1) < NO_ROOM
    return Reading(table, F.pad(valid, (0, 1), value=True), torch.stack([cosines, centred]), standard, mute)


def _likeness(similarities: torch.Tensor, neighbors: torch.Tensor, m: int) -> torch.Tensor:
    """Mean similarity (n, t + 1) of each token to the first m neighbors."""
    first = neighbors[:, : 1 + m]
    return torch.einsum("nij,nj->ni", similarities[:, :, : first.shape[1]], first) / first.sum(1, keepdim=True).clamp(
        min=1
    )


class Gates(nn.Module):
    """gate_i = σ(a + b (z_i - 1) + 2 c·x_i)² of the tokens x_i, z the similarity in standard deviations of the list.

    It starts as a method itself: nearly closed but for neighbors that stand out from the list.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.tensor([-3.5, 1.5]))
        self.linear = _zero_linear(width)

    def forward(self, tokens: torch.Tensor, standard: torch.Tensor) -> torch.Tensor:
        """Gates (n, k) in 0..1 of tokens (n, k, W) with standard (n, k)."""
        logit = self.prior[0] + self.prior[1] * (standard - 1) + 2 * self.linear(tokens)[..., 0]
        return torch.sigmoid(logit).square()


class GatedHead(nn.Module):
    """Weights of queries' and of rows' lists from the same tokens, the background's share, self-loops, and hops' α."""

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__()
        width = config.token_width
        self.queries, self.rows = Gates(width), Gates(width)
        self.beta, self.loop = _zero_linear(width), _zero_linear(width)
        self.relevance = _zero_linear(width) if config.auxiliary == "linear" else None
        self.alpha_logit = nn.Parameter(torch.tensor(1.5))

    @property
    def alpha(self) -> torch.Tensor:
        """Share of a hop that comes from the neighbors; the rest is the row's own vector."""
        return self.alpha_logit.sigmoid()

    def forward(self, tokens: torch.Tensor, reading: Reading, valid: torch.Tensor, dba: bool) -> Output:
        """Weights (n, t) of the items, the query's 1, a row's its self-loop; tokens (n, t + 1, W), valid (n, t).

        A list that says nothing leaves its item as it is.
        """
        gates = (self.rows if dba else self.queries)(tokens[:, 1:-1], reading.standard[:, 1:-1])
        gates = gates.masked_fill(reading.mute[:, None], 0)
        own = F.softplus(2 * self.loop(tokens[:, 0]) - 1) if dba else torch.ones_like(tokens[:, 0, :1])
        weights = torch.cat([own, gates], dim=1).masked_fill(~valid, 0)
        logits = None if self.relevance is None else 2 * self.relevance(tokens[:, 1:-1])[..., 0]
        return Output(weights, logits, weights, tokens[:, :-1])

    def share(self, tokens: torch.Tensor, reading: Reading) -> torch.Tensor:
        """How much of the background (n,) is taken away from an expanded query, from 0 to 2."""
        return (2 * torch.sigmoid(2 * self.beta(tokens[:, -1])[..., 0] - 0.5)).masked_fill(reading.mute, 0)


class GatedTokens(nn.Module):
    """token_i = mlp(what the list says of item i)."""

    def __init__(self, config: "LAttQEConfig") -> None:
        super().__init__()
        width = config.token_width
        self.mlp = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, reading: Reading, stack: Stack) -> torch.Tensor:
        """Transformed tokens (n, t + 1, W)."""
        return stack(EncoderInputs(self.mlp(reading.features), reading.valid, reading.relations))


def _zero_linear(width: int) -> nn.Linear:
    linear = nn.Linear(width, 1)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
