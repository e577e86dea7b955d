"""Importers, one file for each foreign format: `for block in open_source("vectors.npy").blocks(8192): ...`."""

from lattqe.formats.reader import ENDINGS, RowBlock
from lattqe.formats.source import ImportSource, open_source

__all__ = ["ENDINGS", "ImportSource", "RowBlock", "open_source"]
