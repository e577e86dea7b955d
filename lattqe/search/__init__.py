"""Exact search and kNN graphs on one device; results do not depend on blocks, shards or devices."""

from lattqe.search.exact import merge
from lattqe.search.graph import knn_graph
from lattqe.search.index import FlatIndex, Index
from lattqe.search.topk import count_above, topk
from lattqe.search.topk import pair_scores as score

__all__ = ["FlatIndex", "Index", "count_above", "knn_graph", "merge", "score", "topk"]
