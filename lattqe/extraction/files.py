"""Reading one file by its address, on disk or on S3."""

from lattqe.store import open_place


def read_file(uri: str) -> bytes:
    """The whole file at a path or an s3:// address."""
    whole = open_place(uri).uri  # absolute, where it is a path
    folder, _, name = whole.rpartition("/")
    return open_place(folder or "/").read(name)
