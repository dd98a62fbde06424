"""Convert nested state to a JSON tree and the tensors at its leaves, and back.

A tensor's name is its path: the keys from the outermost to the innermost, joined by slashes. Names are unique: in a
text key, `~` is written as `~0` and `/` as `~1` (as in JSON Pointer, RFC 6901). Any other key is written as JSON,
preceded by `~=` if the mapping has text keys too. Version 0.1 of shoestring formed names differently if keys contained
these characters, or if a mapping had both text and number keys. Checkpoints of version 0.1 can still be read, because a
tree contains the names of all its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import CheckpointError

# A value that JSON cannot represent becomes an object with one of these keys. A mapping becomes a list of pairs with
# the key _MAP.
_TENSOR, _ARRAY, _TUPLE, _MAP = "tensor", "array", "tuple", "map"
_SCALARS = {str, int, float, bool, type(None)}


def root(name: str) -> str:
    """Return the path of a whole state, given its name. Colons are escaped, because a colon separates rank and path in
    the names of tensors that belong to one rank."""
    return step(name).replace(":", "~2")


def encode(value: Any, path: str, leaves: dict[str, Tensor]) -> Any:
    """Convert nested mappings, lists, tuples, tensors, arrays and JSON scalars to a JSON tree.

    Args:
        path: path of the value; a prefix of the paths of nested values; see `root`.
        leaves: mapping to which tensors and arrays are added by their paths, without copies. DTensors stay DTensors.

    Raises:
        CheckpointError: a value cannot be saved; the error names its path.
    """
    try:
        return _encode(value, path, leaves)
    except RecursionError:
        message = f"cannot save `{path.lstrip('/')}`: it is nested too deeply, or contains itself"
        raise CheckpointError(message) from None


def _encode(value: Any, path: str, leaves: dict[str, Tensor]) -> Any:
    if type(value) in _SCALARS:
        return value
    match value:
        case Tensor():
            kind = "nested" if value.is_nested else "sparse" if value.layout is not torch.strided else ""
            if kind or value.is_meta:
                problem = (
                    f"a {kind} tensor ({value.layout})" if kind else "a tensor on the meta device, which has no data"
                )
                hint = "keep it dense" if kind else "materialise it first"
                raise CheckpointError(f"cannot save `{path.lstrip('/')}`: {problem}", hint=hint)
            return {_TENSOR: _put(value.detach() if value.requires_grad else value, path, leaves)}
        case dict() | Mapping():
            written = step if {str}.issuperset(map(type, value)) else _steps(value, path)
            return {_MAP: [[key, _encode(item, f"{path}/{written(key)}", leaves)] for key, item in value.items()]}
        case tuple():
            return {_TUPLE: _encode(list(value), path, leaves)}
        case list():
            if _SCALARS.issuperset(map(type, value)):  # a shortcut for long lists of numbers
                return list(value)
            return [_encode(item, f"{path}/{index}", leaves) for index, item in enumerate(value)]
        case np.ndarray() if value.dtype.kind in "biufc":
            array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {_ARRAY: _put(torch.from_numpy(array), path, leaves)}
        case np.bool_() | np.integer() | np.floating() if isinstance(value.item(), bool | int | float):
            return value.item()
        case bool() | int() | float() | str():
            return value
    raise CheckpointError(f"cannot save `{path.lstrip('/')}`: a {type(value).__name__}", hint="keep tensors or numbers")


def _steps(value: Mapping[Any, Any], path: str) -> Callable[[Any], str]:
    """Return the function that converts keys to steps of a path, for a mapping in which not all keys are strings."""
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise CheckpointError(f"cannot save `{path.lstrip('/')}`: its key {key!r} is neither a string nor a number")
    mark = "~=" if any(isinstance(key, str) for key in value) else ""
    return lambda key: step(key) if isinstance(key, str) else mark + json.dumps(key)


def merged(trees: Iterable[Any]) -> Any:
    """Merge the trees that the ranks have written for one state. Mappings are merged to have the keys of all ranks.
    Lists of names, such as the parameters of a group, are merged to have all names. For other values that differ, the
    first rank's value is used.
    """
    first, *others = trees
    for other in others:
        if first != other:
            first = _merged(first, other)
    return first


def merged_states(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the trees that the ranks have written, for all states, by name."""
    names = dict.fromkeys(name for states in of_ranks for name in states)
    return {name: merged([states[name] for states in of_ranks if name in states]) for name in names}


def _merged(one: Any, other: Any) -> Any:
    match one, other:
        case {"map": list(mine)}, {"map": list(theirs)}:
            there = {json.dumps(key): value for key, value in theirs}
            both = [[key, _merged(value, there.pop(json.dumps(key), value))] for key, value in mine]
            return {_MAP: both + [[key, value] for key, value in theirs if json.dumps(key) in there]}
        case {"tuple": list(mine)}, {"tuple": list(theirs)}:
            return {_TUPLE: _merged(mine, theirs)}
        case list(), list() if all(isinstance(item, str) for item in [*one, *other]):
            return list(dict.fromkeys([*one, *other]))
        case list(), list() if len(one) == len(other):
            return [_merged(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    return one


def decode(tree: Any, leaf: Callable[[str], Any]) -> Any:
    """Convert a JSON tree from `encode` back to nested state.

    Args:
        leaf: function that returns the tensor at a path, or an object that takes the tensor's place.

    Raises:
        CheckpointError: the tree is damaged.
    """
    try:
        return _decode(tree, leaf)
    except (AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"a saved state is damaged: {type(error).__name__}: {error}") from error


def _decode(tree: Any, leaf: Callable[[str], Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, leaf) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((form, content),) = tree.items()
    if form == _TENSOR:
        return leaf(content)
    if form == _ARRAY:
        return leaf(content).numpy()
    if form == _TUPLE:
        return tuple(_decode(item, leaf) for item in content)
    if form != _MAP:
        raise ValueError(f"a value has the unknown form {form!r}")
    return {key: _decode(item, leaf) for key, item in content}


def step(key: str) -> str:
    """Escape a text key for use in a path."""
    return key.replace("~", "~0").replace("/", "~1")


def _put(tensor: Tensor, path: str, leaves: dict[str, Tensor]) -> str:
    if path in leaves:  # a mapping may have several NaN keys, whose paths are equal
        raise CheckpointError(f"cannot save `{path.lstrip('/')}`: two values have this name", hint="rename a key")
    leaves[path] = tensor
    return path
