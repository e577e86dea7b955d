"""The LAttQE network: its configuration, its ablations, its fast inference."""

from lattqe.model.ablations import ABLATIONS, ablation
from lattqe.model.config import LAttQEConfig
from lattqe.model.fast import FastLAttQE
from lattqe.model.head import Output
from lattqe.model.network import LAttQE

__all__ = ["ABLATIONS", "FastLAttQE", "LAttQE", "LAttQEConfig", "Output", "ablation"]
