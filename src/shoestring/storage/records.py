"""Builds dataclasses from untrusted tables; a value whose type does not match its field is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 1 << 60
"""Numbers whose magnitude is this large or larger are refused."""


def record(kind: type[T], table: object, where: str = "") -> T:
    """Build an instance of the dataclass `kind` from a JSON object; missing entries take the defaults of their fields.

    Args:
        where: name of the table in error messages.

    Raises:
        ValueError: an entry has no field of its name, or its value does not match the field's type, is not finite, or
            is too large.
        TypeError: a field without a default is missing.
    """
    if not isinstance(table, dict):
        raise ValueError(f"`{where}` is not a table")
    hints = _hints(kind)
    if unknown := table.keys() - hints.keys():
        raise ValueError(f"`{where}` has an unknown entry {min(map(str, unknown))[:40]!r}")
    return kind(
        **{name: _value(hints[name], value, f"{where}.{name}" if where else name) for name, value in table.items()}
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Map the names of a dataclass's fields to their types; cached, because resolving annotations is slow."""
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is list and isinstance(value, list):
        return [_value(inside[0], entry, where) for entry in value]
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _value(inside[1], entry, where) for key, entry in value.items()}
    if is_dataclass(hint):
        return record(hint, value, where)
    if origin is Literal and value in inside:
        return value
    if hint in (str, bool) and type(value) is hint:
        return value
    if hint is int and type(value) is int and abs(value) < _LARGEST:
        return value
    if hint is float and type(value) in (int, float) and math.isfinite(value) and abs(value) < _LARGEST:
        return float(value)
    raise ValueError(f"`{where}` is {value!r:.40}")
