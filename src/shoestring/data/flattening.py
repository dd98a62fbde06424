"""Samples as bytes and back: tensors, numbers and texts in mappings, lists and tuples, without pickle.

A description as JSON, of which samples of one kind have the same, then the tensors' elements at multiples of 64 bytes.
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
    """A sample of tensors, arrays, numbers and texts in mappings, lists and tuples.

    Raises:
        DataError: there is something else in it.
    """
    parts: list[bytes] = []

    def described(each: Any) -> Any:
        if isinstance(each, torch.Tensor | np.ndarray):
            tensor = torch.as_tensor(each).detach().cpu().contiguous()
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            begin = sum(map(len, parts))
            parts.append(raw + b"\0" * (-len(raw) % _ALIGNED))
            return {"t": [isinstance(each, np.ndarray), str(tensor.dtype)[6:], list(tensor.shape), begin]}
        if isinstance(each, Mapping):
            return {"m": [[key, described(value)] for key, value in each.items()]}
        if isinstance(each, list | tuple):
            return {"l" if isinstance(each, list) else "u": [described(value) for value in each]}
        if each is None or isinstance(each, bool | int | float | str):
            return {"v": each}
        raise DataError(f"a sample holds a {type(each).__name__}, which the cache cannot keep")

    head = json.dumps(described(sample)).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % _ALIGNED)
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def from_bytes(raw: bytearray | memoryview) -> Any:
    """The sample that `to_bytes` was given; its tensors are views of `raw`, which nobody else may change."""
    (length,) = _LENGTH.unpack_from(raw)
    begin = _LENGTH.size + length

    def built(each: dict[str, Any]) -> Any:
        ((kind, value),) = each.items()
        if kind == "t":
            array, dtype, shape, at = value
            tensor = _view(raw, getattr(torch, dtype), shape, begin + at)
            return tensor.numpy() if array else tensor
        if kind == "m":
            return {key: built(inner) for key, inner in value}
        return value if kind == "v" else (list if kind == "l" else tuple)(built(inner) for inner in value)

    return built(_description(bytes(memoryview(raw)[_LENGTH.size : begin])))


def _view(raw: Any, dtype: torch.dtype, shape: list[int], begin: int) -> torch.Tensor:
    count = math.prod(shape)
    flat = torch.frombuffer(raw, dtype=dtype, count=count, offset=begin) if count else torch.empty(0, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


@lru_cache(maxsize=64)
def _description(head: bytes) -> dict[str, Any]:
    return json.loads(head)
