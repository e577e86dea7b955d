"""Exact search and kNN graphs on one device; results do not depend on blocks, shards or devices."""

from lattqe.search.exact import merge
from lattqe.search.graph import knn_graph
from lattqe.search.index import FlatIndex, Index, count_above
from lattqe.search.index import pair_scores as score
from lattqe.search.topk import topk

__all__ = ["FlatIndex", "Index", "count_above", "knn_graph", "merge", "score", "topk"]
