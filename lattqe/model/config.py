"""What a LAttQE network is made of: one frozen dataclass; the defaults are the paper's network."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from lattqe.errors import LattqeError

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
    """An int or a float; True and False are no numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool)
