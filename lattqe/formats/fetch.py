"""Files on S3 as files on disk: downloaded for as long as they are read."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash

from lattqe.errors import LattqeError
from lattqe.store import open_place
from lattqe.store.place import check_name

CHUNK = 8 << 20


@contextmanager
def local_files(uris: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield a path on disk for each of the named `uris` (paths, file:// or s3://); downloads are gone afterwards.

    Errors raised meanwhile name the URI instead of the downloaded copy.
    """
    with tempfile.TemporaryDirectory(prefix="lattqe-import-") as folder:
        origins: dict[str, str] = {}
        try:
            yield {name: _local(uri, Path(folder, name), origins) for name, uri in uris.items()}
        except LattqeError as error:
            message = str(error)
            for copy, uri in origins.items():
                message = message.replace(copy, uri)
            raise type(error)(message) from error


def file_digest(path: str | Path) -> str:
    """xxh3-128 of a file's content, for provenance and for telling whether a source has changed."""
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _local(uri: str, folder: Path, origins: dict[str, str]) -> str:
    """Return the path of a local file as it was given; download others into `folder`."""
    if "://" not in uri:
        return uri
    parent, _, name = uri.rpartition("/")
    place = open_place(parent)
    if place.is_local:
        return str(Path(place.uri) / check_name(name))
    copy = folder / check_name(name)
    origins[str(copy)] = uri
    try:
        folder.mkdir()
    except OSError as error:
        raise LattqeError(f"cannot download {uri} to {copy.parent}: {error.strerror or error}") from error
    place.download(name, copy)
    return str(copy)
