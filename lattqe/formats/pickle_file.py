"""Pickles of plain data, read without unpickling.

`load(path)` imports nothing and calls nothing that a file names. A pickle is a program for a small stack machine;
`Machine` is that machine with everything but data taken out: containers, strings, numbers and numpy arrays of them.
Each operation is a function of the machine; `OPERATIONS` maps its code to it. A name outside `pickle_names.MEANINGS`
is refused by that name.

No declared size is trusted: strings and arrays are slices of the file, and what has to be copied is charged to a budget
in proportion to the file's size. Byte strings of 64 KiB and more, and arrays, are views of the memory-mapped file.
"""

import mmap
import os
import struct
from codecs import escape_decode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.pickle_names import MEANINGS, ElementType, Malformed, Name, UnbuiltArray, key
from lattqe.formats.reader import check_file

HIGHEST_PROTOCOL = 5
VIEWED_BYTES = 1 << 16  # byte strings from this size on are left in the file
ONLY_DATA = "only plain containers, strings, numbers and numpy arrays are read"


def load(path: str | os.PathLike[str]) -> Any:
    """Read a pickle file: dicts, lists, tuples, sets, strings, bytes, numbers, numpy arrays; anything else is refused.

    Strings of Python 2 are decoded as latin-1.
    """
    path = Path(path)
    check_file(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it has been emptied meanwhile
        raise LattqeError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return loads(data, str(path))


def loads(
    data: bytes | mmap.mmap,
    name: str = "pickle",
    *,
    meanings: Mapping[Name, Callable[..., Any]] = MEANINGS,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle held in memory; `name` stands in error messages.

    `meanings` are the names the pickle may mention; `persistent` resolves its persistent ids (torch files have them).
    """
    return loads_first(data, name, meanings=meanings, persistent=persistent)[0]


def loads_first(
    data: bytes | mmap.mmap | memoryview,
    name: str,
    *,
    meanings: Mapping[Name, Callable[..., Any]] = MEANINGS,
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """Read the pickle that data begins with: its value, and where it ends."""
    machine = Machine(memoryview(data), meanings, persistent)
    try:
        return machine.run(), machine.position
    except Malformed as error:
        raise LattqeError(f"{name} is refused: {error}") from error
    except LattqeError:
        raise
    except Exception as error:  # the program of a damaged file can fail in any way; none of them is a bug of ours
        raise LattqeError(f"{name} is not a readable pickle: damaged near byte {machine.position}") from error


class _Mark:
    """Stands on the stack where a container's items begin."""


_MARK = _Mark()


class Machine:
    """The stack machine: `position` in `data`, the stack, and the memo of values mentioned again."""

    def __init__(
        self, data: memoryview, meanings: Mapping[Name, Callable[..., Any]], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.data, self.position = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.meanings, self.persistent = meanings, persistent
        self.budget = 16 * len(data) + (1 << 20)

    def run(self) -> Any:
        """Run the program and return the value that it leaves."""
        data, operations = self.data, OPERATIONS
        while True:
            if self.position >= len(data):
                raise Malformed(f"it is truncated after {len(data)} bytes")
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                break
            operation = operations.get(code)
            if operation is None:
                raise Malformed(f"byte {self.position - 1} is not an operation of a data pickle ({code:#04x})")
            operation(self)
        (value,) = self.stack
        return value

    def take(self, count: int) -> memoryview:
        """Advance over the next `count` bytes; a count beyond the end of the file is refused, never allocated."""
        end = self.position + count
        if end > len(self.data):
            raise Malformed(f"it is truncated: {count} bytes are declared at {self.position}")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, layout: struct.Struct) -> Any:
        """Read a number of the given layout."""
        return layout.unpack(self.take(layout.size))[0]

    def line(self) -> bytes:
        """Read a line of text, as protocol 0 has them."""
        start, step = self.position, 256
        while start < len(self.data):
            piece = bytes(self.data[start : start + step])
            end = piece.find(b"\n")
            if end >= 0:
                text = bytes(self.data[self.position : start + end])
                self.position = start + end + 1
                return text
            start, step = start + step, step * 2
        raise Malformed("it is truncated in the middle of a line")

    def items(self) -> list[Any]:
        """Take everything above the last mark, and the mark."""
        stack, depth = self.stack, len(self.stack) - 1
        while stack[depth] is not _MARK:
            depth -= 1
            if depth < 0:
                raise Malformed("a mark is missing")
        items = stack[depth + 1 :]
        del stack[depth:]
        return items

    def charge(self, arguments: Any) -> None:
        """Count what a call will copy: a small file that repeats a call can otherwise fill the memory."""
        for argument in arguments:
            self.budget -= len(argument) if hasattr(argument, "__len__") else 1
        if self.budget < 0:
            raise Malformed("it expands to far more than its own size")


def _push(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def _push_new(kind: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(kind())


def _push_number(layout: str) -> Callable[[Machine], None]:
    compiled = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.number(compiled))


def _push_sized(layout: str, convert: Callable[[memoryview], Any]) -> Callable[[Machine], None]:
    """Push what follows a length of the given layout."""
    compiled = struct.Struct(layout)

    def operation(machine: Machine) -> None:
        count = machine.number(compiled)
        if count < 0:
            raise Malformed("a length is negative")
        machine.stack.append(convert(machine.take(count)))

    return operation


def _text(piece: memoryview) -> str:
    return str(piece, "utf-8", "surrogatepass")


def _text_of_python2(piece: memoryview) -> str:
    return str(piece, "latin-1")


def _bytes(piece: memoryview) -> bytes | memoryview:
    return bytes(piece) if len(piece) < VIEWED_BYTES else piece


def _bytearray(piece: memoryview) -> bytearray | memoryview:
    return bytearray(piece) if len(piece) < VIEWED_BYTES else piece


def _integer(piece: memoryview) -> int:
    return int.from_bytes(piece, "little", signed=True)


def _int_line(machine: Machine) -> None:
    text = machine.line()
    machine.stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else int(text))


def _long_line(machine: Machine) -> None:
    machine.stack.append(int(machine.line().removesuffix(b"L")))


def _float_line(machine: Machine) -> None:
    machine.stack.append(float(machine.line()))


def _string_line(machine: Machine) -> None:
    text = machine.line()
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
        raise Malformed("a string is not quoted")
    machine.stack.append(escape_decode(text[1:-1])[0].decode("latin-1"))


def _unicode_line(machine: Machine) -> None:
    machine.stack.append(str(machine.line(), "raw-unicode-escape"))


def _last_tuple(count: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        if len(machine.stack) < count:
            raise Malformed("the stack is empty")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return operation


def _marked(kind: Callable[[list[Any]], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(kind(machine.items()))


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    return {key(name): value for name, value in zip(items[::2], items[1::2], strict=True)}


def _top(machine: Machine, *kinds: type) -> Any:
    top = machine.stack[-1]
    if not isinstance(top, kinds):
        raise Malformed(f"items are added to a {type(top).__name__}")
    return top


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _top(machine, list).append(item)


def _extend(machine: Machine) -> None:
    items = machine.items()
    _top(machine, list).extend(items)


def _set_item(machine: Machine) -> None:
    value, name = machine.stack.pop(), machine.stack.pop()
    _top(machine, dict)[key(name)] = value


def _set_items(machine: Machine) -> None:
    items = machine.items()
    _top(machine, dict, OrderedDict).update(_dict_of(items))


def _add_items(machine: Machine) -> None:
    items = machine.items()
    _top(machine, set).update(key(item) for item in items)


def _remember(machine: Machine, place: int) -> None:
    value = machine.stack[-1]
    machine.memo[place] = value
    if isinstance(value, UnbuiltArray):
        value.memo.append(place)


def _put(layout: str) -> Callable[[Machine], None]:
    compiled = struct.Struct(layout)
    return lambda machine: _remember(machine, machine.number(compiled))


def _get(layout: str) -> Callable[[Machine], None]:
    compiled = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.memo[machine.number(compiled)])


def _name(machine: Machine, module: Any, attribute: Any) -> None:
    name = Name(str(module), str(attribute))
    if name not in machine.meanings:
        raise Malformed(f"it asks for {str(name)!r:.120}; {ONLY_DATA}")
    machine.stack.append(name)


def _global_lines(machine: Machine) -> None:
    _name(machine, machine.line().decode("utf-8"), machine.line().decode("utf-8"))


def _global_of_stack(machine: Machine) -> None:
    attribute, module = machine.stack.pop(), machine.stack.pop()
    _name(machine, module, attribute)


def _call(machine: Machine) -> None:
    arguments, name = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, Name) or not isinstance(arguments, tuple):
        raise Malformed("it calls something that is not a name")
    machine.charge(arguments)
    machine.stack.append(machine.meanings[name](*arguments))


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, ElementType):
        target.build(state)
    elif isinstance(target, UnbuiltArray):
        machine.charge((state[-1],) if isinstance(state, tuple) and isinstance(state[-1], str) else ())
        array: np.ndarray = target.build(state)
        machine.stack[-1] = array
        machine.memo.update(dict.fromkeys(target.memo, array))
    elif not isinstance(target, OrderedDict):  # a state_dict of torch carries `_metadata`, which is not data
        raise Malformed(f"it sets attributes of a {type(target).__name__}")


def _persistent_line(machine: Machine) -> None:
    machine.stack.append(machine.line().decode("latin-1"))
    _persistent(machine)


def _persistent(machine: Machine) -> None:
    if machine.persistent is None:
        raise Malformed("it refers to data outside of itself (a persistent id)")
    machine.stack.append(machine.persistent(machine.stack.pop()))


def _refuse(what: str) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        raise Malformed(f"it {what}; {ONLY_DATA}")

    return operation


def _instance_lines(machine: Machine) -> None:
    name = b".".join((machine.line(), machine.line())).decode("latin-1")
    raise Malformed(f"it makes an instance of {name!r:.120}; {ONLY_DATA}")


def _protocol(machine: Machine) -> None:
    if (protocol := machine.take(1)[0]) > HIGHEST_PROTOCOL:
        raise Malformed(f"it is written in protocol {protocol}; the highest known is {HIGHEST_PROTOCOL}")


def _skip_frame(machine: Machine) -> None:
    machine.take(8)  # frames only help reading ahead


_STOP = ord(".")
_INSTANCE = _refuse("makes an instance of a class")
_EXTENSION = _refuse("uses the extension registry")
_BUFFER = _refuse("refers to an out-of-band buffer")
OPERATIONS: dict[int, Callable[[Machine], None]] = {
    code[0]: operation
    for code, operation in {
        b"\x80": _protocol, b"\x95": _skip_frame,
        b"(": _push(_MARK), b"0": lambda machine: machine.stack.pop(), b"1": lambda machine: machine.items(),
        b"2": lambda machine: machine.stack.append(machine.stack[-1]),
        b"N": _push(None), b"\x88": _push(True), b"\x89": _push(False),
        b"I": _int_line, b"L": _long_line, b"F": _float_line, b"S": _string_line, b"V": _unicode_line,
        b"J": _push_number("<i"), b"K": _push_number("<B"), b"M": _push_number("<H"), b"G": _push_number(">d"),
        b"\x8a": _push_sized("<B", _integer), b"\x8b": _push_sized("<i", _integer),
        b"T": _push_sized("<i", _text_of_python2), b"U": _push_sized("<B", _text_of_python2),
        b"\x8c": _push_sized("<B", _text), b"X": _push_sized("<I", _text), b"\x8d": _push_sized("<Q", _text),
        b"C": _push_sized("<B", _bytes), b"B": _push_sized("<I", _bytes), b"\x8e": _push_sized("<Q", _bytes),
        b"\x96": _push_sized("<Q", _bytearray),
        b"]": _push_new(list), b"}": _push_new(dict), b"\x8f": _push_new(set), b")": _push(()),
        b"l": _marked(list), b"d": _marked(_dict_of), b"t": _marked(tuple),
        b"\x91": _marked(lambda items: frozenset(key(item) for item in items)),
        b"\x85": _last_tuple(1), b"\x86": _last_tuple(2), b"\x87": _last_tuple(3),
        b"a": _append, b"e": _extend, b"s": _set_item, b"u": _set_items, b"\x90": _add_items,
        b"p": lambda machine: _remember(machine, int(machine.line())), b"q": _put("<B"), b"r": _put("<I"),
        b"\x94": lambda machine: _remember(machine, len(machine.memo)),
        b"g": lambda machine: machine.stack.append(machine.memo[int(machine.line())]),
        b"h": _get("<B"), b"j": _get("<I"),
        b"c": _global_lines, b"\x93": _global_of_stack, b"R": _call, b"b": _build,
        b"P": _persistent_line, b"Q": _persistent,
        b"i": _instance_lines, b"o": _INSTANCE, b"\x81": _INSTANCE, b"\x92": _INSTANCE,
        b"\x82": _EXTENSION, b"\x83": _EXTENSION, b"\x84": _EXTENSION, b"\x97": _BUFFER, b"\x98": _BUFFER,
    }.items()
}  # fmt: skip
