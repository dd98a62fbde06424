"""Nested state as a JSON tree and the tensors at its leaves, and back.

A tensor's name is its path: the keys from the outside in, with slashes between them. No two paths have the same name:
in a key that is text, `~` is written as `~0` and `/` as `~1` (as in JSON Pointer, RFC 6901); any other key is written
as JSON, after `~=` where keys beside it are text. Checkpoints of version 0.1 have other names where keys hold these
characters, or are text and numbers; they are read as well, for the tree holds every name that it refers to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import CheckpointError

# A value that JSON has no form for is an object with one of these keys; plain mappings are lists of pairs under _MAP.
_TENSOR, _ARRAY, _TUPLE, _MAP = "tensor", "array", "tuple", "map"
_SCALARS = {str, int, float, bool, type(None)}


def root(name: str) -> str:
    """The path of a state by its name. It holds no colon, which comes after the rank in the name of a rank's tensor."""
    return step(name).replace(":", "~2")


def encode(value: Any, path: str, leaves: dict[str, Tensor]) -> Any:
    """The JSON tree of nested mappings, lists, tuples, tensors, arrays and JSON scalars.

    Tensors and arrays are put into `leaves` as they are, under their path; DTensors stay DTensors.

    Args:
        path: the value's own; see `root`.

    Raises:
        CheckpointError: a value that cannot be saved, named by its path.
    """
    try:
        return _encode(value, path, leaves)
    except RecursionError:
        message = f"cannot save `{path.lstrip('/')}`: it is nested too deeply, or holds itself"
        raise CheckpointError(message) from None


def _encode(value: Any, path: str, leaves: dict[str, Tensor]) -> Any:
    if type(value) in _SCALARS:
        return value
    match value:
        case Tensor():
            _check_dense(value, path)
            return {_TENSOR: _put(value.detach() if value.requires_grad else value, path, leaves)}
        case dict() | Mapping():
            written = step if {str}.issuperset(map(type, value)) else _steps(value, path)
            return {_MAP: [[key, _encode(each, f"{path}/{written(key)}", leaves)] for key, each in value.items()]}
        case tuple():
            return {_TUPLE: _encode(list(value), path, leaves)}
        case list():
            if _SCALARS.issuperset(map(type, value)):  # a random state has hundreds of numbers
                return list(value)
            return [_encode(each, f"{path}/{index}", leaves) for index, each in enumerate(value)]
        case np.ndarray() if value.dtype.kind in "biufc":
            array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {_ARRAY: _put(torch.from_numpy(array), path, leaves)}
        case np.bool_() | np.integer() | np.floating() if isinstance(value.item(), bool | int | float):
            return value.item()
        case bool() | int() | float() | str():
            return value
    raise CheckpointError(f"cannot save `{path.lstrip('/')}`: a {type(value).__name__}", hint="keep tensors or numbers")


def _check_dense(tensor: Tensor, path: str) -> None:
    kind = "nested" if tensor.is_nested else "sparse" if tensor.layout is not torch.strided else ""
    if kind or tensor.is_meta:
        said = f"a {kind} tensor ({tensor.layout})" if kind else "a tensor on the meta device, which has no data"
        hint = "keep it dense" if kind else "materialise it first"
        raise CheckpointError(f"cannot save `{path.lstrip('/')}`: {said}", hint=hint)


def _steps(value: Mapping[Any, Any], path: str) -> Callable[[Any], str]:
    """How the keys of a mapping are written in a path."""
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise CheckpointError(f"cannot save `{path.lstrip('/')}`: its key {key!r} is no string or number")
    mark = "~=" if any(isinstance(key, str) for key in value) else ""
    return lambda key: step(key) if isinstance(key, str) else mark + json.dumps(key)


def decode(tree: Any, leaf: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; `leaf` gives the tensor of a path, or what is to stand for it.

    Raises:
        CheckpointError: it is no such tree.
    """
    try:
        return _decode(tree, leaf)
    except (AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"what is saved is no state, or damaged: {type(error).__name__}: {error}") from error


def _decode(tree: Any, leaf: Callable[[str], Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, leaf) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((form, content),) = tree.items()
    if form == _TENSOR:
        return leaf(content)
    if form == _ARRAY:
        return leaf(content).numpy()
    if form == _TUPLE:
        return tuple(_decode(each, leaf) for each in content)
    if form != _MAP:
        raise ValueError(f"a value of the form {form!r}")
    return {key: _decode(each, leaf) for key, each in content}


def step(key: str) -> str:
    """A key that is text, as a part of a path."""
    return key.replace("~", "~0").replace("/", "~1")


def _put(tensor: Tensor, path: str, leaves: dict[str, Tensor]) -> str:
    if path in leaves:  # each key that is not a number (NaN) is another one, but all are written alike
        raise CheckpointError(f"cannot save `{path.lstrip('/')}`: two values have this name", hint="rename a key")
    leaves[path] = tensor
    return path
