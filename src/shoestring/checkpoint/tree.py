"""Nested state as a JSON tree and the tensors at its leaves, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import CheckpointError

# A value that JSON has no form for is an object with one of these keys; plain mappings are lists of pairs under _MAP.
_TENSOR, _ARRAY, _TUPLE, _MAP = "tensor", "array", "tuple", "map"
_SCALARS = {str, int, float, bool, type(None)}


def encode(value: Any, path: str, leaves: dict[str, Tensor]) -> Any:
    """The JSON tree of nested mappings, lists, tuples, tensors, arrays and JSON scalars.

    Tensors and arrays are put into `leaves` as they are, under their path; DTensors stay DTensors.

    Raises:
        CheckpointError: a value of another type, named by its path.
    """
    if type(value) in _SCALARS:
        return value
    match value:
        case Tensor():
            return {_TENSOR: _put(value.detach() if value.requires_grad else value, path, leaves)}
        case dict() | Mapping():
            if not _SCALARS.issuperset(map(type, value)):
                _check_keys(value, path)
            return {_MAP: [[key, encode(each, f"{path}/{key}", leaves)] for key, each in value.items()]}
        case tuple():
            return {_TUPLE: encode(list(value), path, leaves)}
        case list():
            if _SCALARS.issuperset(map(type, value)):  # a random state has hundreds of numbers
                return list(value)
            return [encode(each, f"{path}/{index}", leaves) for index, each in enumerate(value)]
        case np.ndarray() if value.dtype.kind in "biufc":
            array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {_ARRAY: _put(torch.from_numpy(array), path, leaves)}
        case np.bool_() | np.integer() | np.floating() if isinstance(value.item(), bool | int | float):
            return value.item()
        case bool() | int() | float() | str():
            return value
    raise CheckpointError(f"cannot save `{path.lstrip('/')}`: a {type(value).__name__}", hint="keep tensors or numbers")


def _check_keys(value: Mapping[Any, Any], path: str) -> None:
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise CheckpointError(f"cannot save `{path.lstrip('/')}`: its key {key!r} is no string or number")


def decode(tree: Any, leaf: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; `leaf` gives the tensor of a path."""
    if isinstance(tree, list):
        return [decode(each, leaf) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((form, content),) = tree.items()
    if form == _TENSOR:
        return leaf(content)
    if form == _ARRAY:
        return leaf(content).numpy()
    if form == _TUPLE:
        return tuple(decode(each, leaf) for each in content)
    return {key: decode(each, leaf) for key, each in content}


def _put(tensor: Tensor, path: str, leaves: dict[str, Tensor]) -> str:
    """Two paths may read alike: of the keys 1 and "1", or "a/b" and "b" inside "a"."""
    name = path if path not in leaves else f"{path}~{len(leaves)}"
    leaves[name] = tensor
    return name
