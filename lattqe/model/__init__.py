"""The LAttQE network: its configuration, its fast inference, the model that ships."""

from lattqe.model.config import LAttQEConfig
from lattqe.model.encoder import Output
from lattqe.model.fast import FastLAttQE
from lattqe.model.network import LAttQE

__all__ = ["FastLAttQE", "LAttQE", "LAttQEConfig", "Output"]
