"""Reads tables of a run file into frozen dataclasses; checks types strictly and refuses unknown keys."""

from __future__ import annotations

import ast
import inspect
import logging
import math
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import cattrs

from shoestring.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
log = logging.getLogger("shoestring")


def structure(table: object, settings: type[T], where: str, source: str) -> T:
    """Read a table into the dataclass `settings`.

    Args:
        where: name of the table, for error messages.
        source: name of the file, for error messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value has a wrong type or is not finite.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: `{where}` must be a table, got {table!r}", hint=f"write [{where}]")
    names, retired = [field.name for field in fields(settings)], getattr(settings, "retired", ())
    if former := [f"`{key}`" for key in table if key in retired]:
        message = "%s: [%s] contains results of an earlier run, which are not settings and are ignored: %s"
        log.warning(message, source, where, ", ".join(former))
        table = {key: value for key, value in table.items() if key not in retired}
    for key in table:
        if key not in names:
            raise ConfigError(f"{source}: unknown key `{key}` in [{where}]", hint=nearest(key, names))
    for field in fields(settings):
        if field.name not in table and field.default is field.default_factory is MISSING:
            raise ConfigError(f"{source}: `{where}.{field.name}` is missing")
    hints = get_type_hints(settings)
    values = {key: _value(value, hints[key], f"{where}.{key}", source) for key, value in table.items()}
    for key, value in values.items():
        # Infinity is allowed for a bound if its neutral value, which means "no bound", is infinity.
        endless = getattr(getattr(settings, "neutral", None), key, None) == value
        if isinstance(value, float) and not math.isfinite(value) and not endless:
            raise ConfigError(f"{source}: `{where}.{key}` must be a finite number, got {value}")
    return settings(**values)


def defaults(settings: type[DataclassInstance]) -> dict[str, Any]:
    """Map the names of fields to their defaults; fields without a default are left out."""
    return {field.name: field.default for field in fields(settings) if field.default is not MISSING}


def _value(value: Any, kind: Any, where: str, source: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return structure(value, kind, where, source)
    listed = isinstance(value, list | tuple)  # cattrs would also accept a string, as a list of characters
    if listed and (settings := _settings_in(kind)):
        return tuple(structure(item, settings, f"{where}[{index}]", source) for index, item in enumerate(value))
    choices = [kind] if get_origin(kind) is not UnionType else get_args(kind)
    for choice in choices if any(get_origin(choice) is tuple for choice in choices) else [kind]:
        if (get_origin(choice) is tuple) <= listed:
            with suppress(Exception):  # the exceptions that cattrs raises have no common base class
                return _converter().structure(value, choice)
    if get_origin(kind) is Literal and isinstance(value, str):
        hint = nearest(value, [str(choice) for choice in get_args(kind)])
        raise ConfigError(f"{source}: `{where}` cannot be {value!r}", hint=hint)
    raise ConfigError(f"{source}: `{where}` must be {describe(kind)}, got {value!r}")


def _settings_in(kind: Any) -> type | None:
    """Return the dataclass of the items if `kind` is a tuple of dataclasses (an array of tables in TOML), else None."""
    inside = get_args(kind)[0] if get_origin(kind) is tuple else None
    return inside if isinstance(inside, type) and is_dataclass(inside) else None


def describe(kind: Any) -> str:
    """Describe a type in words for users, such as `a number` or `one of "a", "b"`."""
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        return "a table"
    if _settings_in(kind):
        return "a list of tables"
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if get_origin(parts[0]) is Literal:
            return f"a list, each {describe(parts[0])}"
        inside = words.get(parts[0], "a value").removeprefix("a ")
        return f"a list of {inside}s" if parts[-1] is Ellipsis else f"a list of {len(parts)} {inside}s"
    return " or ".join(describe(part) for part in get_args(kind))


@cache
def _converter() -> cattrs.Converter:
    """Make a strict converter, which accepts an int for a float, but no string for a number and no bool for an int."""
    converter = cattrs.Converter()
    for kind, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(kind, _strict(kind, accepted))

    def is_scalar_union(kind: Any) -> bool:
        parts = set(get_args(kind))
        return parts != set() and parts <= {int, float, str, bool} and get_origin(kind) is not tuple

    def keep_if_member(value: Any, kind: Any) -> Any:
        if type(value) not in get_args(kind):
            raise TypeError("its type is not a member of the union")
        return value

    converter.register_structure_hook_func(is_scalar_union, keep_if_member)
    return converter


def _strict(kind: type, accepted: tuple[type, ...]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"not {kind.__name__}")
        return kind(value)

    return hook


def help_texts(settings: type) -> dict[str, str]:
    """Map fields to their help texts, which are the strings below the fields in the class that defines them."""
    texts: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        if is_dataclass(base):
            texts |= _texts(base)
    return texts


@cache
def _texts(settings: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
