"""Kept state as bytes and back, without pickle: tensors as safetensors, everything else as JSON in its metadata."""

from __future__ import annotations

import json
import zlib
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
    tree = json.dumps(_encode(state, "", tensors))
    try:
        return save(tensors, metadata={"tree": tree, "sum": _checksum(tree, tensors)})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
        raise CheckpointError(f"cannot save tensors of {', '.join(kinds)}: {error}") from error


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of `pack`.

    Raises:
        CheckpointError: the bytes are damaged or were not written by `pack`.
    """
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        if metadata["sum"] != _checksum(metadata["tree"], tensors):
            raise ValueError("its content is not what was written")
        return _decode(json.loads(metadata["tree"]), tensors)
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"not a saved state, or damaged: {error}") from error


def _checksum(tree: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of everything: safetensors itself would read a flipped bit as another number."""
    total = zlib.crc32(tree.encode())
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():  # those without elements may have strides that cannot be viewed
            total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            # Numbered, for two paths may read alike: of the keys 1 and "1", or "a/b" and "b" inside "a".
            name = f"{len(tensors)}{path}"
            tensors[name] = _whole(value)
            return {_TENSOR: name}
        case np.ndarray() if value.dtype.kind in "biufc":
            name = f"{len(tensors)}{path}"
            tensors[name] = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
            return {_ARRAY: name}
        case np.bool_() | np.integer() | np.floating() if isinstance(value.item(), bool | int | float):
            return value.item()
        case Mapping() if all(isinstance(key, str | int | float | None) for key in value):
            return {_MAP: [[key, _encode(each, f"{path}/{key}", tensors)] for key, each in value.items()]}
        case Mapping():
            odd = next(key for key in value if not isinstance(key, str | int | float | None))
            raise CheckpointError(f"cannot save `{path.lstrip('/')}`: its key {odd!r} is no string or number")
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
