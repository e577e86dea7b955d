"""Exact search and kNN graphs on one device; results do not depend on blocks, shards or devices."""

import sys
from types import ModuleType
from typing import Any

from lattqe.search.exact import merge
from lattqe.search.graph import knn_graph
from lattqe.search.index import FlatIndex, Index, count_above, topk
from lattqe.search.index import pair_scores as score

__all__ = ["FlatIndex", "Index", "count_above", "knn_graph", "merge", "score", "topk"]


class _CallableModule(ModuleType):
    """`lattqe.search(xq, xb, k)` is part of the Python API, and this package has the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `lattqe.api.search`."""
        from lattqe.api import search

        return search(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
