"""What the few names that a pickle of plain data may mention mean: sets, ordered dicts, byte strings, numpy arrays.

Nothing here is looked up by name in a module: a name either stands in `MEANINGS` or the pickle is refused.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Name:
    """A global that the pickle mentions, as text; never an imported object."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class Malformed(Exception):
    """The pickle says something that no writer of plain data says."""


@dataclass
class ElementType:
    """A numpy dtype while the pickle is still spelling it: its code ('f4') first, its byte order later."""

    code: str
    order: str = "="

    def numpy(self) -> np.dtype:
        """Return the dtype that was spelled."""
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]

    def build(self, state: Any) -> None:
        """Take the state (version, byte order, subdtype, names, fields, itemsize, alignment, flags)."""
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise Malformed("a numpy dtype is malformed")
        if any(part is not None for part in state[2:5]):
            raise Malformed("a numpy dtype has fields; only plain numbers and strings are read")
        self.order = state[1]


@dataclass
class UnbuiltArray:
    """A numpy array whose shape and bytes the pickle has not told yet; `memo` are the places that refer to it."""

    memo: list[int] = field(default_factory=list)

    def build(self, state: Any) -> np.ndarray:
        """Make the array out of (version, shape, dtype, is Fortran order, bytes); older writers leave out version."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise Malformed("a numpy array is malformed")
        shape, dtype, fortran, raw = state[-4:]
        return array_of(raw, dtype, shape, "F" if fortran else "C")


def raw_bytes(raw: Any) -> bytes | bytearray | memoryview:
    """Bytes as they stand in the pickle; Python 2 wrote them as text, in latin-1."""
    if isinstance(raw, str):
        return raw.encode("latin-1")
    if isinstance(raw, (bytes, bytearray, memoryview)):
        return raw
    raise Malformed(f"a numpy array holds a {type(raw).__name__} instead of bytes")


def array_of(raw: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    """View `raw` as an array. The declared shape must account for every byte, so nothing is ever allocated by it."""
    if not isinstance(dtype, ElementType) or not isinstance(shape, tuple) or len(shape) > 32:
        raise Malformed("a numpy array is malformed")
    if not all(type(side) is int and side >= 0 for side in shape):
        raise Malformed(f"a numpy array has the impossible shape {shape!s:.100}")
    data, element = raw_bytes(raw), dtype.numpy()
    if len(data) != math.prod(shape) * element.itemsize:
        raise Malformed(f"a numpy array declares {shape!s:.100} of {element} but holds {len(data)} bytes")
    if not data:
        return np.empty(shape, element)
    return np.frombuffer(data, element).reshape(shape, order=order)  # type: ignore[call-overload]


def key(value: Any) -> Any:
    """Let a scalar, or a flat tuple of scalars, be a key; hashing deeper ones can be made to take forever."""
    flat = value if isinstance(value, tuple) else (value,)
    if all(part is None or isinstance(part, (str, bytes, int, float, np.generic)) for part in flat):
        return value
    raise Malformed(f"a {type(value).__name__} of containers is used as a key")


def _dtype(code: Any, *_flags: Any) -> ElementType:
    if isinstance(code, (bytes, bytearray)):
        code = bytes(code).decode("latin-1")
    if isinstance(code, str) and re.fullmatch(r"O\d*", code):
        raise Malformed("it holds a numpy array of Python objects; only numbers and strings are read")
    if not isinstance(code, str) or not re.fullmatch(r"[biufcSU]\d{1,9}", code):
        raise Malformed(f"it holds a numpy array of the unreadable type {code!r:.40}")
    try:
        np.dtype(code)
    except TypeError:
        raise Malformed(f"it holds a numpy array of the unknown type {code!r:.40}") from None
    return ElementType(code)


def _reconstruct(kind: Any, *_shape_and_code: Any) -> UnbuiltArray:
    if not isinstance(kind, Name) or str(kind) != "numpy.ndarray":
        raise Malformed(f"it holds an array of the kind {kind!s:.80}")
    return UnbuiltArray()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any, *_axes: Any) -> np.ndarray:
    if order not in ("C", "F") or _axes:
        raise Malformed(f"a numpy array has the unreadable order {order!r:.40}")
    return array_of(raw, dtype, shape, order)


def _scalar(dtype: Any, raw: Any) -> Any:
    return array_of(raw, dtype, (), "C")[()]


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    if not isinstance(text, str) or codec not in ("latin1", "latin-1", "utf-8"):
        raise Malformed("bytes are malformed")
    return text.encode(codec)


def _bytes(*parts: Any) -> bytes:
    if not parts:
        return b""
    if isinstance(parts[0], str):
        return _encode(*parts)
    if isinstance(parts[0], (bytes, bytearray, memoryview)):  # never a number: bytes(10**12) would allocate it
        return bytes(parts[0])
    raise Malformed("bytes are malformed")


def _items(parts: tuple[Any, ...]) -> list[Any]:
    if not parts:
        return []
    if len(parts) != 1 or not isinstance(parts[0], (list, tuple)):
        raise Malformed("a container is malformed")
    return list(parts[0])


def _ordered(*parts: Any) -> OrderedDict[Any, Any]:
    pairs = _items(parts)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise Malformed("an OrderedDict is malformed")
    return OrderedDict((key(name), value) for name, value in pairs)


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise Malformed("a complex number is malformed")
    return complex(real, imaginary)


_BUILTINS: dict[str, Callable[..., Any]] = {
    "set": lambda *parts: {key(item) for item in _items(parts)},
    "frozenset": lambda *parts: frozenset(key(item) for item in _items(parts)),
    "bytes": _bytes,
    "bytearray": lambda *parts: bytearray(_bytes(*parts)),
    "complex": _complex,
}


def _not_callable(*_parts: Any) -> Any:
    raise Malformed("it calls numpy.ndarray, which may only be mentioned")


# Python 2 and 3, numpy 1 and 2 spell the same names under different modules.
MEANINGS: dict[Name, Callable[..., Any]] = {
    Name("_codecs", "encode"): _encode,
    Name("collections", "OrderedDict"): _ordered,
    Name("numpy", "dtype"): _dtype,
    Name("numpy", "ndarray"): _not_callable,
    **{Name(module, name): call for module in ("builtins", "__builtin__") for name, call in _BUILTINS.items()},
    **{Name(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{Name(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{Name(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}
