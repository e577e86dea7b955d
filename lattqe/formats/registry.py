"""Which importer reads which kind of file."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lattqe.errors import LattqeError
from lattqe.formats.reader import Options, Reader, check_file, decoding


@dataclass(frozen=True)
class Format:
    """A foreign format: its file endings, and the module and function that open it (loaded when first needed)."""

    endings: tuple[str, ...]
    module: str
    function: str


FORMATS = (
    Format((".npy",), "npy", "open_npy"),
    Format((".mat",), "mat", "open_mat"),
    Format((".pkl", ".pickle"), "pickled", "open_pickle"),
    Format((".fvecs",), "fvecs", "open_fvecs"),
    Format((".h5", ".hdf5"), "hdf5", "open_hdf5"),
    Format((".parquet",), "parquet", "open_parquet"),
    Format((".arrow",), "arrow", "open_arrow"),
    Format((".pt", ".pth"), "torch_zip", "open_torch"),
    Format((".safetensors",), "safetensors_file", "open_safetensors"),
)
ENDINGS = tuple(ending for format in FORMATS for ending in format.endings)


def open_reader(path: str | Path, options: Options | None = None) -> Reader:
    """Open one foreign file by its ending."""
    path = Path(path)
    format = find_format(str(path))
    check_file(path)
    opener = getattr(importlib.import_module(f"lattqe.formats.{format.module}"), format.function)
    with decoding(path, format.endings[0]):
        return cast(Reader, opener(path, options or Options()))


def find_format(name: str) -> Format:
    """Return the format of a file name; refuse unknown endings."""
    if Path(name).is_dir():
        raise LattqeError(f"{name} is a directory: give the files in it, such as {name.rstrip('/')}/*.arrow")
    ending = Path(name).suffix.lower()
    for format in FORMATS:
        if ending in format.endings:
            return format
    raise LattqeError(f"{name}: the ending {ending!r} is unknown; known are {' '.join(ENDINGS)}")
