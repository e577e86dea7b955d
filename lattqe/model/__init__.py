"""The LAttQE network: its configuration, its fast inference, the model that ships."""

from lattqe.model.encoder import Output
from lattqe.model.fast import FastLAttQE
from lattqe.model.network import LAttQE, LAttQEConfig

__all__ = ["FastLAttQE", "LAttQE", "LAttQEConfig", "Output"]
