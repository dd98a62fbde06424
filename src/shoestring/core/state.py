"""Kept state as bytes and back, without pickle: tensors as safetensors, everything else as JSON in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.distributed.tensor import DTensor

from shoestring.core.errors import CheckpointError

# A value that JSON has no form for is an object with one of these keys; plain mappings are lists of pairs under _MAP.
_TENSOR, _ARRAY, _TUPLE, _MAP = "tensor", "array", "tuple", "map"


def pack(state: Mapping[str, Any]) -> bytes:
    """Serialise nested mappings, lists, tuples, tensors, arrays and JSON scalars.

    A DTensor is gathered whole, which is a collective: every rank of its mesh must pack.

    Raises:
        CheckpointError: a value of another type, named by its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _encode(state, "", tensors)
    return save(tensors, metadata={"tree": json.dumps(tree)})


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of `pack`.

    Raises:
        CheckpointError: the bytes are damaged or were not written by `pack`.
    """
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tree"])
        return _decode(tree, tensors)
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"not a saved state, or damaged: {error}") from error


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            tensors[path] = _whole(value)
            return {_TENSOR: path}
        case np.ndarray():
            tensors[path] = torch.from_numpy(np.ascontiguousarray(value))
            return {_ARRAY: path}
        case np.generic():
            return value.item()
        case Mapping():
            return {_MAP: [[key, _encode(each, f"{path}/{key}", tensors)] for key, each in value.items()]}
        case tuple():
            return {_TUPLE: [_encode(each, f"{path}/{index}", tensors) for index, each in enumerate(value)]}
        case list():
            return [_encode(each, f"{path}/{index}", tensors) for index, each in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise CheckpointError(f"cannot save `{path.lstrip('/')}`: a {type(value).__name__}", hint="keep tensors or numbers")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # A clone, because safetensors refuses tensors that share memory (tied weights).
    return whole.detach().cpu().contiguous().clone()


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((form, content),) = tree.items()
    if form == _TENSOR:
        return tensors[content]
    if form == _ARRAY:
        return tensors[content].numpy()
    if form == _TUPLE:
        return tuple(_decode(each, tensors) for each in content)
    return {key: _decode(each, tensors) for key, each in content}
