"""As much of protobuf's wire format as is written and read here: varints, doubles, texts and messages within messages.

Fields are (number, value) pairs. An int becomes a varint, a float a double, text and bytes a length and their content,
a sequence a message of the fields in it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Value: TypeAlias = "int | float | str | bytes | Sequence[Field]"
Field = tuple[int, Value]

_VARINT, _DOUBLE, _LENGTH = 0, 1, 2
_SIZES = {_DOUBLE: 8, 5: 4}  # bytes of values that have the same size always


def varint(value: int) -> bytes:
    """An integer in groups of seven bits, the lowest first; negative ones as 64 bits of two's complement."""
    value &= (1 << 64) - 1
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def packed(values: Iterable[int]) -> bytes:
    """The content of a repeated field of integers."""
    return b"".join(map(varint, values))


def message(fields: Sequence[Field]) -> bytes:
    """The bytes of a message."""
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
    """The fields of a message; of other types than varints their bytes."""
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
    """An integer, and where what follows it begins."""
    value, shift = 0, 0
    while content[at] > 127:
        value |= (content[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | content[at] << shift, at + 1
