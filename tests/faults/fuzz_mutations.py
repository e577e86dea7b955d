"""Ways to damage a file: flipped bits, cuts, insertions, splices of two files, and edited length fields."""

import random

# Numbers that lengths go wrong with.
INTERESTING = (0, 1, 2, 3, 7, 8, 16, 64, 127, 128, 255, 256, 1000, 4096, 65535, 65536, 2**24, 2**31 - 1, 2**31,
               2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
# Values that readers of JSON go wrong with.
VALUES = (None, True, False, -1, 0, 1, 10**30, 2**31, 2**63, 1.5, -0.0, 1e308, "", "x", "../x", "/etc/passwd",
          "a\x00b", "ü" * 50, [], {}, [[]], {"a": {}}, ["id"], "float16", "float32", "float64",
          "part-00000.arrow")  # fmt: skip


def flip_bits(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def set_bytes(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x2E, 0x0A, rng.randrange(256)))
    return data


def truncate(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    return data[: rng.randrange(len(data))]


def extend(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    return data + rng.randbytes(rng.choice((1, 4, 16, 100)))


def insert(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 1, 2, 4, 8, 64))) + data[place:]


def remove(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    place = rng.randrange(len(data))
    del data[place : place + rng.choice((1, 1, 2, 4, 8, 64))]
    return data


def repeat(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    place = rng.randrange(len(data))
    piece = data[place : place + rng.choice((1, 4, 16, 100))]
    return data[:place] + piece * rng.choice((1, 2, 50)) + data[place:]


def splice(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    """Put a piece of another file over a piece of this one."""
    size = rng.choice((4, 16, 64, 256))
    source, place = rng.randrange(len(other)), rng.randrange(len(data))
    piece = other[source : source + size]
    return data[:place] + piece + data[place + (len(piece) if rng.random() < 0.7 else 0) :]


def edit_length(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    """Write a number that lengths go wrong with, over 1, 2, 4 or 8 bytes."""
    width = rng.choice((1, 2, 4, 4, 8, 8))
    number = rng.choice(INTERESTING) if rng.random() < 0.7 else len(data) + rng.randrange(-16, 17)
    place = rng.randrange(max(1, len(data) - width + 1))
    if rng.random() < 0.5:
        place -= place % width
    data[place : place + width] = (number % 256**width).to_bytes(width, rng.choice(("little", "little", "big")))
    return data


MUTATIONS = (flip_bits, set_bytes, truncate, extend, insert, remove, repeat, splice, edit_length, edit_length)


def mutated(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Damage a file once or a few times."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not damaged:
            break
        damaged = rng.choice(MUTATIONS)(damaged, rng, other)
    return bytes(damaged)


def mutated_json(value: object, rng: random.Random) -> object:
    """Change one value, key or length somewhere in a JSON document."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if what < 0.15:
            return {**value, rng.choice(("", "x", "..", "é")): value[key]}
        return {**value, key: mutated_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        what = rng.random()
        if what < 0.15:
            return value[:place] + value[place + 1 :]
        if what < 0.3:
            return [*value, value[place]]
        return [*value[:place], mutated_json(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)
