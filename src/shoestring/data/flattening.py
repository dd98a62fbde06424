"""Samples as bytes and back: tensors, numbers and texts in mappings, lists and tuples, without pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch

from shoestring.core.errors import DataError


def to_bytes(sample: Any) -> bytes:
    """A sample of tensors, arrays, numbers and texts in mappings, lists and tuples.

    Raises:
        DataError: there is something else in it.
    """
    tensors: dict[str, torch.Tensor] = {}

    def described(each: Any) -> Any:
        if isinstance(each, torch.Tensor | np.ndarray):
            tensors[f"{len(tensors):06d}"] = torch.as_tensor(each).contiguous()
            return {"t": int(isinstance(each, np.ndarray))}
        if isinstance(each, Mapping):
            return {"m": [[key, described(value)] for key, value in each.items()]}
        if isinstance(each, list | tuple):
            return {"l" if isinstance(each, list) else "u": [described(value) for value in each]}
        if each is None or isinstance(each, bool | int | float | str):
            return {"v": each}
        raise DataError(f"a sample holds a {type(each).__name__}, which the cache cannot keep")

    return safetensors.torch.save(tensors, {"sample": json.dumps(described(sample))})


def from_bytes(raw: bytes) -> Any:
    """The sample that `to_bytes` was given."""
    (length,) = struct.unpack("<Q", raw[:8])
    described = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["sample"])
    tensors = iter([tensor for _, tensor in sorted(safetensors.torch.load(raw).items())])

    def built(each: dict[str, Any]) -> Any:
        ((kind, value),) = each.items()
        if kind == "t":
            return next(tensors).numpy() if value else next(tensors)
        if kind == "m":
            return {key: built(inner) for key, inner in value}
        return value if kind == "v" else (list if kind == "l" else tuple)(built(inner) for inner in value)

    return built(described)
