"""LAttQE and its configuration: tokens, a stack of self-attention encoders, weights.

The paper's network has the vectors as tokens and cosines in the transformed space as weights. The relational one
(`LAttQEConfig.relational`) has relations as tokens and signed weights, from which a background is taken away. The
defaults of the configuration are the paper's network.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.model.encoder import (
    EncoderInputs,
    Head,
    Output,
    RelationalTokens,
    SignedHead,
    Stack,
    Tokens,
    background_share,
    relate,
)
from lattqe.model.gated import GatedHead, GatedTokens, WholeList, read
from lattqe.store import load_model

# Beyond any network; what a stored configuration says is compared with the tensors too, where these show it.
LARGEST = {
    "dim": 1 << 20,
    "layers": 1 << 10,
    "heads": 1 << 16,
    "width": 1 << 20,
    "ffn": 1 << 22,
    # No tensor of a relational network shows these, and k neighbors have k² relations.
    "max_k": 1 << 12,
    "background": 1 << 12,
}
CHOICES = {
    "norm": ("post", "pre"),
    "activation": ("relu", "gelu"),
    "positional_start": ("zeros", "small", "normal"),
    "auxiliary": ("linear", "cosine", "none"),
}


@dataclass(frozen=True)
class LAttQEConfig:
    """Sizes, ablations and extensions of the network; each default says why."""

    # Sizes
    dim: int = 2048  # of the vectors; ResNet101-GeM, the paper's
    layers: int = 3  # encoders; the paper saw no gain from more
    heads: int = 64  # the paper's, 32 columns each
    width: int | None = None  # of the tokens; None: the vectors themselves are the tokens, as in the paper;
    #                           a number: a learned linear projection of the vectors into tokens of that width
    ffn: int | None = None  # hidden units of the fully connected part; None: the width, as in the paper
    max_k: int = 128  # neighbors that have a rank embedding; the paper uses 64 and the best rival 72

    # The encoders
    norm: str = "post"  # as in Vaswani et al.; "pre" starts as plain AQE over all k (every weight near 1)
    activation: str = "relu"  # as in Vaswani et al.
    dropout: float = 0.1  # the usual one; 0.3 was seen to leave the weights at AQE's
    attention: bool = True  # False: a stack of fully connected layers, row (iii) of the paper's Table 2

    # The tokens
    visual: bool = True  # False: position only, row (v) of Table 2
    positional: bool = True  # False: row (iv) of Table 2
    positional_start: str = "zeros"  # "small" N(0, .02²) damps the weights, "normal" N(0, 1) drowns unit vectors
    content_dropout: float = 0.0  # on the vectors before they become tokens; the paper has none
    similarity: bool = False  # the similarity to the query as a further input of each token; not in the paper

    # Relations
    relation_bias: bool = False  # attention logits biased by the similarity of the two vectors; not in the paper
    relational: bool = False  # tokens carry relations, weights are signed and start at a prior: see relational.py
    background: int = 0  # relational: depth of the list whose mean is taken away, the paper's {d}⁻; 0: none
    gated: bool = False  # relational: weights are gates that can close, tokens read the whole list: see gated.py

    # The weights
    direct: bool = False  # True: the d̃_i themselves are added up, which the paper's text calls weak
    power_start: float | None = None  # start of a learned power of the cosine, sign kept; None: the cosine itself
    clamp_negative: bool = False  # the paper keeps negative weights as they are
    temperature_start: float = 0.1  # of the softmax for database rows, before it is learned; flatter would be AQE

    # Training only
    auxiliary: str = "linear"  # relevance classifier: on d̃_i as in the paper, on the "cosine" itself, or "none"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise LattqeError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(allowed)}")
        for name in ("dim", "layers", "heads", "width", "ffn", "max_k"):
            value = getattr(self, name)
            optional = name in ("width", "ffn")
            if not (optional and value is None) and (not isinstance(value, int) or not _is_number(value) or value < 1):
                raise LattqeError(f"{name} is {value!r}: use a whole number from 1")
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value > largest:
                raise LattqeError(f"{name} is {str(value)[:40]}: use at most {largest}")
        if not isinstance(self.background, int) or not _is_number(self.background) or self.background < 0:
            raise LattqeError(f"background is {self.background!r}: use a whole number from 0")
        for name in ("dropout", "content_dropout"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < 1):
                raise LattqeError(f"{name} is {value!r}: use a share from 0 to below 1")
        for name in ("power_start", "temperature_start"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < float("inf")) and not (value is None and name == "power_start"):
                raise LattqeError(f"{name} is {value!r}: use a number above 0")
        for setting in dataclasses.fields(self):
            if setting.type is bool and not isinstance(getattr(self, setting.name), bool):
                raise LattqeError(f"{setting.name} is {getattr(self, setting.name)!r}: use true or false")
        if self.token_width % self.heads:
            raise LattqeError(
                f"{self.heads} heads do not divide the width {self.token_width}: use a divisor, as in "
                "--set network.heads=4"
            )
        self._check_tokens()

    def _check_tokens(self) -> None:
        """Refuse tokens that carry nothing or cannot be told apart."""
        if self.background and not self.relational:
            raise LattqeError("a background is for relational tokens: set relational, or background to 0")
        reads = self.relational and self.background and self.relation_bias and not self.visual
        if self.gated and not reads:
            raise LattqeError(
                "a gated network reads relations of a list: set relational and relation_bias, a "
                "background such as 256, and visual to false"
            )
        if self.direct and (self.relational or self.width is not None):
            raise LattqeError("direct adds up tokens as vectors: set relational to false, and no width")
        if self.relational:
            return
        if not (self.visual or self.positional or self.similarity):
            raise LattqeError("a network without visual, positional and similarity input sees nothing: keep one")
        if not (self.visual or self.similarity) and self.positional_start == "zeros":
            raise LattqeError(
                "position only needs positional_start 'small' or 'normal': with zeros all tokens are equal, "
                "every cosine is 1 and none has a gradient"
            )

    @property
    def token_width(self) -> int:
        """Width of the tokens."""
        return self.dim if self.width is None else self.width

    @property
    def any_width(self) -> bool:
        """Whether vectors of any number of columns will do: relations without content have no width."""
        return self.relational and not self.visual

    @property
    def hidden(self) -> int:
        """Hidden units of the fully connected part."""
        return self.token_width if self.ffn is None else self.ffn

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; `direct` only where it is set: networks stored before it existed keep their bytes."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "direct" or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LAttQEConfig":
        """The configuration written by `to_dict`; unknown keys are refused by name."""
        unknown = sorted(set(values) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise LattqeError(f"unknown network setting {', '.join(unknown)}: made by a newer version of lattqe?")
        return cls(**values)


def _is_number(value: object) -> bool:
    """An int or a float; True and False do not count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        """How many neighbors the network needs to see to weigh k of them."""
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
            x = self.stack(EncoderInputs(tokens, relations.valid, torch.stack([relations.cosines, relations.centred])))
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


def check_model(uri: str) -> None:
    """The tensors of a network, whitening or adaptation must be finite, and those that its config.json describes."""
    tensors, config, *_ = load_model(uri)
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise CorruptDataError(f"{uri}: tensor {name!r} holds NaN or infinity")
    try:
        if "network" in config:
            LAttQE.load(uri)
        elif config.get("kind") in ("whitening", "adaptation"):
            from lattqe.whitening import load_map

            load_map(uri)
    except LattqeError as error:
        raise CorruptDataError(str(error)) from error
