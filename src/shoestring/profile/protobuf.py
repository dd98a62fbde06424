"""Reads and writes the part of protobuf's wire format that profiles need: varints, doubles, strings, nested messages.

A field is a (number, value) pair. An int is written as a varint, a float as a double, str and bytes with a length
prefix, and a sequence of fields as a nested message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Value: TypeAlias = "int | float | str | bytes | Sequence[Field]"
Field = tuple[int, Value]

_VARINT, _DOUBLE, _LENGTH = 0, 1, 2
_SIZES = {_DOUBLE: 8, 5: 4}  # bytes of the wire types with a fixed size


def varint(value: int) -> bytes:
    """Encode an integer in groups of seven bits, the lowest first; a negative integer as 64-bit two's complement."""
    value &= (1 << 64) - 1
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def packed(values: Iterable[int]) -> bytes:
    """Encode the content of a packed repeated field of integers."""
    return b"".join(map(varint, values))


def message(fields: Sequence[Field]) -> bytes:
    """Encode a message."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += varint(number << 3 | _VARINT), varint(value)
        elif isinstance(value, float):
            parts += varint(number << 3 | _DOUBLE), struct.pack("<d", value)
        else:
            content = value.encode(errors="replace") if isinstance(value, str) else value
            content = content if isinstance(content, bytes) else message(content)
            parts += varint(number << 3 | _LENGTH), varint(len(content)), content
    return b"".join(parts)


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the (number, value) pairs of a message's fields: varints as integers, all other types as bytes."""
    at = 0
    while at < len(content):
        tag, at = _read_varint(content, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(content, at)
            yield tag >> 3, value
            continue
        size, at = (_SIZES[kind], at) if kind in _SIZES else _read_varint(content, at)
        yield tag >> 3, content[at : at + size]
        at += size


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at offset `at`; return the integer and the offset after the varint."""
    value, shift = 0, 0
    while content[at] > 127:
        value |= (content[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | content[at] << shift, at + 1
