"""Opening a stored thing without knowing beforehand what it is."""

from dataclasses import dataclass

from lattqe.store.features import FeatureSet
from lattqe.store.manifest import Manifest, read_manifest
from lattqe.store.neighbors import NeighborGraph, Ranks
from lattqe.store.place import Place, open_place


@dataclass(frozen=True)
class StoredFiles:
    """A finished thing that is not cut by rows, such as a model: a place and a manifest."""

    place: Place
    manifest: Manifest


Thing = FeatureSet | NeighborGraph | Ranks | StoredFiles


def open_thing(uri: str, cache: str | None = None) -> Thing:
    """A FeatureSet, NeighborGraph or Ranks, or the StoredFiles of any other kind."""
    place = open_place(uri)
    manifest = read_manifest(place)
    for kind in (FeatureSet, NeighborGraph, Ranks):
        if manifest.kind == kind.kind:
            return kind(place, manifest, cache)
    return StoredFiles(place, manifest)


def check_input_kind(uri: str, kind: str) -> Manifest:
    """The manifest of a thing that must be of `kind`; LattqeError names both kinds where it is not."""
    return read_manifest(open_place(uri), kind)
