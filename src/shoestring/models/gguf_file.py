"""Reads untrusted GGUF files: the key-value metadata, and the tensors as views of the memory-mapped file.

The reader of the package `gguf` trusts the counts in the file and reads values one by one. This reader first compares
every count and size with the bytes that remain in the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoestring.storage import foreign

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_ENTRIES, _TEXTS, _DIMENSIONS = 1 << 18, 1 << 22, 4
"""Largest number of metadata values or of tensors in a file; largest number of strings in all arrays of a file, which
are read one by one; and largest number of dimensions of a tensor."""


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """Sizes in the file's order, innermost first."""
    tensor_type: Any
    """The GGMLQuantizationType."""
    data: np.ndarray
    """The elements, outermost dimension first; for a quantised type, the bytes of its blocks."""


class _Cursor:
    """Reads a mapped file sequentially; raises ValueError if the file ends too early."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at, self.texts = data, 0, 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > len(self.data) - self.at:
            raise ValueError(f"the file ends within the value that begins at byte {self.at}")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at].tobytes()

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, form: str, most: int, what: str) -> int:
        if (value := self.number(form)) > most:
            raise ValueError(f"it has {value} {what}")
        return value

    def text(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self) -> Any:
        kind = self.number("<I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            number = self._array(kind, 1)[0].item()
            return bool(number) if kind == _BOOL else number
        inner, count = self.number("<I"), self.number("<Q")
        if inner != _STRING:
            return self._array(inner, count)
        self.texts += count
        if self.texts > _TEXTS or count > (len(self.data) - self.at) // 8:
            raise ValueError(f"it has a list of {count} texts")
        return [self.text() for _ in range(count)]

    def _array(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise ValueError(f"it has values of type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), np.uint8 if kind == _BOOL else dtype)


def read(path: Path, library: Any) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read the metadata values and the tensors of a file, by name; lists of numbers become arrays.

    Args:
        library: the package gguf, which defines the types of tensors.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is not a GGUF file, or is damaged.
    """
    with foreign.open_file(path) as file:
        if file.seek(0, 2) < 24:
            raise ValueError("it is too short")
        data = np.memmap(file, np.uint8, mode="r")  # own file: checked above
    cursor = _Cursor(data)
    if cursor.take(4) != _MAGIC or cursor.number("<I") not in _VERSIONS:
        raise ValueError("it does not begin like a GGUF file of version 2 or 3")
    tensors = cursor.count("<Q", _ENTRIES, "tensors")
    values: dict[str, Any] = {}
    for _ in range(cursor.count("<Q", _ENTRIES, "values")):
        name = cursor.text()
        if name in values:
            raise ValueError(f"it has {name[:80]!r} twice")
        values[name] = cursor.value()
    heads = []
    for _ in range(tensors):
        name = cursor.text()
        shape = tuple(cursor.number("<Q") for _ in range(cursor.count("<I", _DIMENSIONS, "dimensions of a tensor")))
        heads.append(_Head(name, shape, library.GGMLQuantizationType(cursor.number("<I")), cursor.number("<Q")))
    return values, {tensor.name: tensor for tensor in _placed(heads, data, cursor.at, values, library)}


class _Head(NamedTuple):
    """A tensor's entry in the file's header."""

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    offset: int


def _placed(
    heads: list[_Head], data: np.ndarray, end: int, values: Mapping[str, Any], library: Any
) -> Iterator[StoredTensor]:
    """Iterate over the tensors with their data, after checking that the tensors lie within the file and do not
    overlap."""
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        raise ValueError(f"its alignment is {alignment!r}")
    begin = end + -end % alignment
    free = 0  # end of the tensors so far
    if len({head.name for head in heads}) < len(heads):
        raise ValueError("it has two tensors with the same name")
    for head in sorted(heads, key=lambda head: head.offset):
        block, size = library.GGML_QUANT_SIZES[head.tensor_type]
        row = head.shape[0] if head.shape else 1
        nbytes = math.prod(head.shape) // block * size
        if row % block or head.offset < free or begin + head.offset + nbytes > len(data):
            raise ValueError(f"its tensor {head.name[:80]!r} does not lie within the file")
        free = head.offset + nbytes
        raw = data[begin + head.offset :][:nbytes]
        outer = tuple(reversed(head.shape[1:]))
        if (plain := _PLAIN.get(head.tensor_type.name)) is not None:
            elements = np.frombuffer(raw, plain).reshape(*outer, row)
        else:
            elements = raw.reshape(*outer, row // block * size)
        yield StoredTensor(head.name, head.shape, head.tensor_type, elements)
