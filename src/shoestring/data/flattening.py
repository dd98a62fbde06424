"""Serializes samples: tensors, numbers and texts in mappings, lists and tuples, without pickle.

A serialized sample is a JSON description followed by the elements of the tensors, aligned to 64 bytes. Samples of equal
structure have the same description, so parsed descriptions are cached.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shoestring.core.errors import DataError

_ALIGNED = 64
_LENGTH = struct.Struct("<Q")


def to_bytes(sample: Any) -> bytes:
    """Serialize a sample of tensors, arrays, numbers and texts in mappings, lists and tuples.

    Raises:
        DataError: the sample holds a value of another type.
    """
    parts: list[bytes] = []

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor | np.ndarray):
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            begin = sum(map(len, parts))
            parts.append(raw + b"\0" * (-len(raw) % _ALIGNED))
            return {"t": [isinstance(value, np.ndarray), str(tensor.dtype)[6:], list(tensor.shape), begin]}
        if isinstance(value, Mapping):
            return {"m": [[key, describe(entry)] for key, entry in value.items()]}
        if isinstance(value, list | tuple):
            return {"l" if isinstance(value, list) else "u": [describe(entry) for entry in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"v": value}
        raise DataError(f"a sample holds a {type(value).__name__}, which the cache cannot keep")

    head = json.dumps(describe(sample)).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % _ALIGNED)
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def from_bytes(raw: bytearray | memoryview) -> Any:
    """Restore the sample that `to_bytes` serialized. The sample's tensors are views of `raw`, so `raw` must not change
    afterwards.

    Raises:
        DataError: the bytes are not a sample that `to_bytes` serialized.
    """

    def build(description: dict[str, Any], begin: int) -> Any:
        ((kind, value),) = description.items()
        if kind == "t":
            array, name, shape, at = value
            dtype, count = getattr(torch, name), math.prod(shape)
            # An empty tensor is used if there are no elements, because torch.frombuffer refuses a count of 0.
            flat = (
                torch.frombuffer(raw, dtype=dtype, count=count, offset=begin + at)
                if count
                else torch.empty(0, dtype=dtype)
            )
            tensor = flat if len(shape) == 1 else flat.view(shape)
            return tensor.numpy() if array else tensor
        if kind == "m":
            return {key: build(entry, begin) for key, entry in value}
        return value if kind == "v" else (list if kind == "l" else tuple)(build(entry, begin) for entry in value)

    try:
        (length,) = _LENGTH.unpack_from(raw)
        begin = _LENGTH.size + length
        return build(_description(bytes(memoryview(raw)[_LENGTH.size : begin])), begin)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise DataError(f"a cached sample is damaged: {error}", hint="delete the cache") from error


@lru_cache(maxsize=64)
def _description(head: bytes) -> dict[str, Any]:
    return json.loads(head)
