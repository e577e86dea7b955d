"""Importers, one file for each foreign format: `for block in open_source("vectors.npy").blocks(8192): ...`."""

from lattqe.formats.reader import Block
from lattqe.formats.registry import ENDINGS
from lattqe.formats.source import Source, open_source

__all__ = ["ENDINGS", "Block", "Source", "open_source"]
