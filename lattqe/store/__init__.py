"""Stored artifacts: feature sets, neighbor graphs, ranks and models on disk or S3."""

from lattqe.store.artifacts import Edges, NeighborGraph, Ranks, StoredFiles, check_input_kind, open_artifact
from lattqe.store.features import FeatureSet, comparable_labels
from lattqe.store.manifest import (
    Manifest,
    Part,
    edges_schema,
    features_schema,
    find_manifest,
    neighbors_schema,
    part_row_counts,
    ranks_schema,
    read_manifest,
    row_bytes,
)
from lattqe.store.models import load_model, save_model
from lattqe.store.parts import edges_table, features_table, neighbors_table, ranks_table
from lattqe.store.pending import Pending
from lattqe.store.place import ChangedError, MissingFileError, Place, UnavailableError, open_place
from lattqe.store.writer import FeatureWriter

__all__ = [
    "ChangedError",
    "Edges",
    "FeatureSet",
    "FeatureWriter",
    "Manifest",
    "MissingFileError",
    "NeighborGraph",
    "Part",
    "Pending",
    "Place",
    "Ranks",
    "StoredFiles",
    "UnavailableError",
    "check_input_kind",
    "comparable_labels",
    "edges_schema",
    "edges_table",
    "features_schema",
    "features_table",
    "find_manifest",
    "load_model",
    "neighbors_schema",
    "neighbors_table",
    "open_artifact",
    "open_place",
    "part_row_counts",
    "ranks_schema",
    "ranks_table",
    "read_manifest",
    "row_bytes",
    "save_model",
]
