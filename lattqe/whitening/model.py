"""A whitening as a stored model: a mean and a projection, applied to rows and followed by L2."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.store import Manifest, load_model, save_model
from lattqe.store.normalise import normalised

KIND = "whitening"


@dataclass(frozen=True)
class Whitening:
    """y = L2(projection (x - mean)); mean (D,), projection (d, D)."""

    mean: np.ndarray
    projection: np.ndarray
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.projection.ndim != 2 or self.mean.shape != (self.projection.shape[1],):
            raise LattqeError(f"a mean of shape {self.mean.shape} does not fit a projection of {self.projection.shape}")

    @property
    def input_dim(self) -> int:
        """D, of the vectors it takes."""
        return int(self.projection.shape[1])

    @property
    def dim(self) -> int:
        """d, of the vectors it gives."""
        return int(self.projection.shape[0])

    def apply(self, x: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Whiten rows (n, D) → unit vectors (n, d) in `dtype`."""
        if x.ndim != 2 or x.shape[1] != self.input_dim:
            raise LattqeError(f"vectors of shape {x.shape} do not fit a whitening of {self.input_dim}-D")
        mean, projection = self.mean.astype(np.float32), self.projection.astype(np.float32)
        out, good = normalised((x.astype(np.float32) - mean) @ projection.T, dtype)
        if not good.all():
            raise LattqeError(f"row {int(np.flatnonzero(~good)[0])} of {len(x)} has no direction after whitening: it "
                              "equals the mean, or is not finite")
        return out

    def save(self, uri: str, inputs: Mapping[str, Mapping[str, str]] | None = None) -> Manifest:
        """Store as a model thing, in float32."""
        tensors = {"mean": self.mean.astype(np.float32), "projection": self.projection.astype(np.float32)}
        return save_model(uri, tensors, {"kind": KIND, **self.config}, {}, inputs)

    @classmethod
    def load(cls, uri: str) -> tuple["Whitening", Manifest]:
        """Open a stored whitening."""
        tensors, config, _, manifest = load_model(uri)
        if config.get("kind") != KIND or set(tensors) != {"mean", "projection"}:
            raise LattqeError(f"{uri} is a model, but not a whitening: make one with `lattqe whiten learn`")
        return cls(tensors["mean"], tensors["projection"], config), manifest
