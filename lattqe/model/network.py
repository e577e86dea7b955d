"""LAttQE: tokens, a stack of self-attention encoders, weights.

The paper's network has the vectors as tokens and cosines in the transformed space as weights. The relational one
(`LAttQEConfig.relational`) has relations as tokens and signed weights, from which a background is taken away.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lattqe.errors import LattqeError
from lattqe.model.config import LAttQEConfig
from lattqe.model.encoder import (
    Head,
    Inputs,
    Output,
    RelationalTokens,
    SignedHead,
    Stack,
    Tokens,
    background_share,
    relate,
)
from lattqe.model.gated import GatedHead, GatedTokens, WholeList, read

HOP_ALPHA = 0.9  # of networks that did not learn it
VERSION = 1  # of what a saved network means; raised when the same tensors would give other weights


class LAttQE(nn.Module):
    """The network of section 3.3 of the paper; `lattqe.model.fast` is the same for inference."""

    def __init__(self, config: LAttQEConfig | None = None) -> None:
        super().__init__()
        self.config = config or LAttQEConfig()
        if self.config.gated:
            self.gated = GatedTokens(self.config)
        elif self.config.relational:
            self.relational = RelationalTokens(self.config)
        else:
            self.tokens = Tokens(self.config)
        self.stack = Stack(self.config)
        self.head: Head | GatedHead = (
            GatedHead(self.config)
            if self.config.gated
            else SignedHead(self.config)
            if self.config.relational
            else Head(self.config)
        )
        self.metrics: dict[str, Any] = {}  # what was measured in training, where this network was loaded from

    def depth(self, k: int) -> int:
        """How many neighbors the network wants to see in order to weigh k of them."""
        return max(k, self.config.background)

    @property
    def alpha(self) -> torch.Tensor:
        """Share of a hop over the graph that comes from the neighbors; learned by gated networks."""
        return self.head.alpha if isinstance(self.head, GatedHead) else torch.tensor(HOP_ALPHA)

    def forward(
        self, items: torch.Tensor, valid: torch.Tensor | None = None, dba: bool = False, k: int | None = None
    ) -> Output:
        """Weights of the items of n lists.

        items (n, t, D) float32: row 0 the query, then its neighbors by rank; valid (n, t) bool, False on padding and on
        dropped neighbors (which keep their rank), True in column 0; dba: the tempered softmax. k: how many neighbors
        are weighed one by one where a background lets the list be longer; None: as many as there are ranks for.
        """
        self.check_width(items.shape[-1])
        if valid is None:
            valid = items.new_ones(items.shape[:2], dtype=torch.bool)
        if self.config.relational:
            if k is not None and k > self.config.max_k:
                raise LattqeError(f"{k} neighbors, but this network was made for {self.config.max_k}: use a smaller k")
            return self._relate(items, valid, dba, min(k or self.config.max_k, items.shape[1] - 1))
        assert isinstance(self.head, Head)
        return self.head(self.stack(self.tokens(items, valid)), valid, dba)

    def terms(self, output: Output, items: torch.Tensor) -> torch.Tensor:
        """What the weights of the output belong to: the items (n, t, D), or what the encoders made of them."""
        return output.transformed if self.config.direct else items

    def check_width(self, columns: int) -> None:
        """Refuse vectors of other than the training's width, unless the network sees no content and has no width."""
        if columns != self.config.dim and not self.config.any_width:
            raise LattqeError(f"vectors of {columns} columns, but this network was made for {self.config.dim}")

    def _relate(self, items: torch.Tensor, valid: torch.Tensor, dba: bool, k: int) -> Output:
        """The relational network on whole lists: k neighbors are weighed, and the mean of the list is taken away.

        Not from database rows (dba): most of them are related to no query, and what they have in common with their
        surroundings is where they belong.
        """
        depth = self.config.background or k
        share = background_share(valid, depth)
        deep = slice(1, 1 + max(depth, k))
        whole = WholeList(
            torch.bmm(share[:, None], items)[:, 0],
            torch.bmm(items[:, deep], items[:, 0, :, None])[..., 0],
            valid[:, deep],
        )
        found, beta = self.weigh(items[:, : 1 + k], valid[:, : 1 + k], whole, dba)
        weights = F.pad(found.weights, (0, items.shape[1] - 1 - k))
        return dataclasses.replace(found, weights=weights if dba else weights - beta[:, None] * share)

    def weigh(
        self, items: torch.Tensor, valid: torch.Tensor, whole: WholeList, dba: bool = False
    ) -> tuple[Output, torch.Tensor]:
        """Weights of lists whose vectors beyond the k weighed ones are not needed: items (n, 1 + k, D).

        The item and its neighbors, expanded, are Σ w_i d_i for rows, and that less β times the background for queries:
        their weights are scaled so that Σ w_i d_i has length 1. Returns the weights (n, 1 + k) and β (n,).
        """
        if isinstance(self.head, GatedHead):
            reading = read(items, valid, whole)
            x = self.gated(reading, self.stack)
            found, beta = self.head(x, reading, valid, dba), self.head.share(x, reading)
        else:
            assert isinstance(self.head, SignedHead)
            relations = relate(items, valid, whole.background, ranks=self.config.positional)
            tokens = self.relational(relations, items, whole.background)
            x = self.stack(Inputs(tokens, relations.valid, torch.stack([relations.cosines, relations.centred])))
            found, beta = self.head.signed(x, relations, dba), self.head.share(x)
        if dba:
            return found, items.new_zeros(len(items))
        length = torch.bmm(found.weights[:, None], items)[:, 0].norm(dim=1, keepdim=True)
        return dataclasses.replace(found, weights=found.weights / length.clamp(min=1e-6)), beta

    def save(
        self,
        uri: str,
        metrics: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> None:
        """Write model.safetensors, config.json (network and training settings) and metrics.json to a new place."""
        from lattqe.store import save_model

        tensors = {name: tensor.detach().cpu().numpy() for name, tensor in self.state_dict().items()}
        config = {"version": VERSION, "network": self.config.to_dict(), "training": training or {}}
        save_model(uri, tensors, config, metrics or {}, inputs=inputs)

    @classmethod
    def load(cls, uri: str) -> "LAttQE":
        """Read what `save` wrote; a file that does not fit is refused, naming the setting or the tensor."""
        from lattqe.store import load_model

        tensors, config, metrics, _ = load_model(uri)
        network = cls.from_tensors(tensors, config, uri)
        network.metrics = metrics
        return network

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray], config: dict[str, Any], source: str) -> "LAttQE":
        """A network from tensors by name and the configuration stored beside them."""
        settings = config.get("network")
        if not isinstance(settings, dict):
            raise LattqeError(f"{source}: config.json has no settings of a network: it is not a lattqe model")
        try:
            described = LAttQEConfig.from_dict(settings)
            network = cls.hollow(described, layers=_count_encoders(tensors))
        except LattqeError as error:
            raise LattqeError(f"{source}: {error}") from error
        if config.get("version") != VERSION:
            raise LattqeError(
                f"{source}: network version {config.get('version')!r}, this lattqe reads {VERSION}: train it again"
            )
        wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        for name in sorted(set(wanted) ^ set(tensors)):
            problem = "is missing" if name in wanted else "is not part of the network its config.json describes"
            raise LattqeError(f"{source}: tensor {name} {problem}: the files do not belong together")
        for name, shape in wanted.items():
            found = tensors[name]
            if tuple(found.shape) != shape:
                raise LattqeError(
                    f"{source}: tensor {name} has shape {tuple(found.shape)}, its config.json asks for "
                    f"{shape}: the files do not belong together"
                )
            if not np.isfinite(found).all():
                raise LattqeError(f"{source}: tensor {name} holds NaN or infinite values: train it again")
        copies = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in tensors.items()}
        network.load_state_dict(copies, assign=True)
        return network.eval()

    @classmethod
    def hollow(cls, config: LAttQEConfig, layers: int) -> "LAttQE":
        """A network whose tensors have names and shapes, and no memory yet; `layers` encoders are stored.

        A configuration that comes with tensors is not trusted: it could ask for more than there is memory.
        """
        if config.layers > layers:
            raise LattqeError(
                f"{layers} encoders are stored, config.json asks for {config.layers}: the files do not belong together"
            )
        try:
            with torch.device("meta"):
                return cls(config)
        except RuntimeError as error:  # more elements than can be counted
            raise LattqeError(
                "config.json asks for a network that is too large: the files do not belong together"
            ) from error


def _count_encoders(tensors: dict[str, np.ndarray]) -> int:
    names = (name.split(".") for name in tensors if name.startswith("stack.encoders."))
    return len({parts[2] for parts in names})
