"""Tables of a run file as frozen dataclasses: strict types, no unknown keys, errors that say where and what is near."""

from __future__ import annotations

import ast
import inspect
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


def structure(table: object, settings: type[T], where: str, source: str) -> T:
    """Make `settings` from a table.

    Args:
        where: the table's name, for errors. source: the file's.

    Raises:
        ConfigError: a key is unknown (with the nearest one), a value is of another type, or a value is refused.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: `{where}` must be a table, got {table!r}", hint=f"write [{where}]")
    names = [each.name for each in fields(settings)]
    for key in table:
        if key not in names:
            raise ConfigError(f"{source}: unknown key `{key}` in [{where}]", hint=nearest(key, names))
    for each in fields(settings):
        if each.name not in table and each.default is each.default_factory is MISSING:
            raise ConfigError(f"{source}: `{where}.{each.name}` is missing")
    hints = get_type_hints(settings)
    values = {key: _value(value, hints[key], f"{where}.{key}", source) for key, value in table.items()}
    for key, value in values.items():
        endless = getattr(getattr(settings, "neutral", None), key, None) == value  # a bound that bounds nothing
        if isinstance(value, float) and not math.isfinite(value) and not endless:
            raise ConfigError(f"{source}: `{where}.{key}` must be a finite number, got {value}")
    return settings(**values)


def _value(value: Any, kind: Any, where: str, source: str) -> Any:
    listed = isinstance(value, list | tuple)  # a string would become its characters
    if listed and (settings := _settings_in(kind)):
        return tuple(structure(each, settings, f"{where}[{index}]", source) for index, each in enumerate(value))
    choices = [kind] if get_origin(kind) is not UnionType else get_args(kind)
    for choice in choices if any(get_origin(each) is tuple for each in choices) else [kind]:
        if (get_origin(choice) is tuple) <= listed:
            with suppress(Exception):  # cattrs has no common base for what it raises
                return _converter().structure(value, choice)
    if get_origin(kind) is Literal and isinstance(value, str):
        hint = nearest(value, [str(choice) for choice in get_args(kind)])
        raise ConfigError(f"{source}: `{where}` cannot be {value!r}", hint=hint)
    raise ConfigError(f"{source}: `{where}` must be {describe(kind)}, got {value!r}")


def _settings_in(kind: Any) -> type | None:
    """The dataclass of which `kind` is a list: an array of tables."""
    inside = get_args(kind)[0] if get_origin(kind) is tuple else None
    return inside if isinstance(inside, type) and is_dataclass(inside) else None


def describe(kind: Any) -> str:
    """A type in words for users: `a number`, `one of "a", "b"`."""
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
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
    """Strict: a string is no number, true is no 1; only a whole number may stand for a number."""
    converter = cattrs.Converter()
    for kind, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(kind, _strict(kind, accepted))
    converter.register_structure_hook_func(_is_scalar_union, _any_of)
    return converter


def _strict(kind: type, accepted: tuple[type, ...]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"not {kind.__name__}")
        return kind(value)

    return hook


def _is_scalar_union(kind: Any) -> bool:
    return get_args(kind) != () and set(get_args(kind)) <= {int, float, str, bool} and get_origin(kind) is not tuple


def _any_of(value: Any, kind: Any) -> Any:
    if type(value) not in get_args(kind):
        raise TypeError("none of the union")
    return value


def help_texts(settings: type) -> dict[str, str]:
    """Each field's help: the string that stands under it in the class, or in the class it inherits the field from."""
    texts: dict[str, str] = {}
    for each in reversed(settings.__mro__):
        if is_dataclass(each):
            texts |= _texts(each)
    return texts


def _texts(settings: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for one, following in zip(body.body, body.body[1:], strict=False):
        match one, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
