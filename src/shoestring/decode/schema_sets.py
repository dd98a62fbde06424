"""Unions, intersections and complements of JSON schemas; does not import torch.

All schemas must have been rewritten (see `schema_forms`), so they contain neither conditions nor `oneOf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shoestring.core.errors import ConfigError

Schema = bool | dict[str, Any]
Keywords = dict[str, Any]

TYPES = ("null", "boolean", "object", "array", "number", "string")
MOST = 20_000
"""Largest number of schemas that are rewritten or negated for one schema, which takes a fraction of a second."""
MOST_LISTS = 400
"""Largest number of lists of distinct values that are enumerated, enough for lists of five possible values."""
COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
SILENT = frozenset({
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions", "title", "description",
    "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema",
})  # fmt: skip
"""Keywords that do not restrict the documents."""
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}


_left: ContextVar[list[int]] = ContextVar("left")


@contextmanager
def bounded() -> Iterator[None]:
    """Context in which `count` may be called at most `MOST` times."""
    token = _left.set([MOST])
    try:
        yield
    finally:
        _left.reset(token)


def count() -> None:
    """Count one schema, because nested conditions can turn one schema into exponentially many.

    Raises:
        ConfigError: more than `MOST` schemas were counted.
    """
    left = _left.get()
    left[0] -= 1
    if left[0] < 0:
        raise refused("it is too long once its conditions are written out")


def refused(reason: str) -> ConfigError:
    return ConfigError(f"{reason} cannot be expressed" if reason.startswith(("`", "the neg")) else reason)


def both(schemas: list[Schema]) -> Schema:
    if False in schemas:
        return False
    wanted = [part for part in schemas if part not in (True, {})]
    return wanted[0] if len(wanted) == 1 else {"allOf": wanted} if wanted else True


def either(schemas: list[Schema]) -> Schema:
    if True in schemas or {} in schemas:
        return True
    possible = [part for part in schemas if part is not False]
    return possible[0] if len(possible) == 1 else {"anyOf": possible} if possible else False


def complement(schema: Schema) -> Schema:
    """A schema that allows exactly the documents that a rewritten schema forbids.

    Raises:
        ConfigError: a keyword cannot be negated.
    """
    count()
    if isinstance(schema, bool):
        return not schema
    return either([part for key, value in schema.items() for part in _fails(key, value)])


def _fails(key: str, value: Any) -> Iterator[Schema]:
    """Yield schemas whose union allows exactly the documents that a keyword forbids."""
    if key in SILENT:
        return
    if key == "type":
        yield _other_types({value} if isinstance(value, str) else set(value))
    elif key in ("const", "enum"):
        yield _unlike([value] if key == "const" else value)
    elif key == "required":
        yield from ({"type": "object", "properties": {name: False}} for name in value)
    elif key == "properties":
        fails = {name: complement(part) for name, part in value.items()}
        possible = {name: part for name, part in fails.items() if part is not False}
        yield from ({"type": "object", "required": [name], "properties": {name: possible[name]}} for name in possible)
    elif key in _OPPOSITES:
        yield {"type": "number", _OPPOSITES[key]: value}
    elif key in COUNTS and not key.endswith("Contains"):
        kind = {"Length": "string", "Items": "array"}.get(key[3:], "object")
        if key.startswith("max"):
            yield {"type": kind, f"min{key[3:]}": value + 1}
        else:
            yield {"type": kind, f"max{key[3:]}": value - 1} if value > 0 else False
    elif key in ("prefixItems", "items") and isinstance(value, list):
        yield from (
            {"type": "array", "minItems": number + 1, "prefixItems": [*[True] * number, complement(part)]}
            for number, part in enumerate(value)
        )
    elif key == "allOf":
        yield from map(complement, value)
    elif key == "anyOf":
        yield both([complement(part) for part in value])
    else:
        raise refused(f"the negation of `{key}`")


def _other_types(names: set[str]) -> Schema:
    """A schema that allows all documents whose type is not among the names."""
    if "integer" in names and "number" not in names:
        raise refused("the negation of the type `integer`")
    others = [name for name in TYPES if name not in names]
    return {"type": others} if others else False


def _unlike(values: list[Any]) -> Schema:
    """A schema that allows all documents except some values."""
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if any(isinstance(value, list | dict) for value in values):
        raise refused("the negation of a list or an object")
    possible: list[Schema] = [{"type": ["object", "array"]}]
    possible += [{"const": value} for value in (True, False, None) if not any(value is part for part in values)]
    possible.append({"type": "string", "allOf": [{"pattern": _other(text)} for text in texts]})
    beside = [{"anyOf": [{"exclusiveMaximum": value}, {"exclusiveMinimum": value}]} for value in numbers]
    return {"anyOf": [*possible, {"type": "number", "allOf": beside}]}


def _other(text: str) -> str:
    """A regular expression that matches all texts except one."""
    pattern = "[\\s\\S]+"
    for character in reversed(text):
        one = re.escape(character)
        pattern = f"(?:[^{one}][\\s\\S]*|{one}(?:{pattern}))?"
    return f"^(?:{pattern})$"


def disjoint(one: Schema, other: Schema) -> bool:
    """Whether it is certain that no document is allowed by both of two rewritten schemas."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    types = [_types(part) for part in (one, other)]
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    values = [_values(part) for part in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not any(_equal(left, right) for left in values[0] for right in values[1])
    shared = set(one.get("required", [])) & set(other.get("required", []))
    return types[0] == {"object"} and any(
        disjoint(one.get("properties", {}).get(name, True), other.get("properties", {}).get(name, True))
        for name in shared
    )


def _types(schema: Keywords) -> set[str] | None:
    value = schema.get("type")
    if value is None:
        return None
    return {"number" if name == "integer" else name for name in ([value] if isinstance(value, str) else value)}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, in which true and 1 differ; in Python, True == 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other


# -- lists without repetition ------------------------------------------------------------------------------------------


def values_of(schema: Schema) -> list[Any] | None:
    """The documents that a rewritten schema allows, if they can be enumerated without lists and objects; else None."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or set(schema) - {"type", "const", "enum"} - SILENT:
        return None
    types, values = _types(schema), _values(schema)
    if values is None and (types is None or types - {"null", "boolean"}):
        return None
    if values is None:
        values = [None, False, True]
    if any(isinstance(value, list | dict) for value in values) or "integer" in str(schema.get("type")):
        return None
    names = {type(None): "null", bool: "boolean", str: "string"}
    distinct = list[Any]()
    for value in values:
        is_allowed = types is None or names.get(type(value), "number") in types
        if is_allowed and not any(_equal(value, other) for other in distinct):
            distinct.append(value)
    return distinct


def unique(prefix: list[list[Any] | None], rest: list[Any] | None, least: int, most: int | None) -> list[Any] | None:
    """Enumerate all lists of distinct values.

    Args:
        prefix: the possible values at each of the first places; None if they cannot be enumerated.
        rest: the possible values at all later places; None if they cannot be enumerated.
        least, most: smallest and largest length of a list; a `most` of None means that there is no limit.

    Returns:
        The lists; None if there are more than `MOST_LISTS`, or infinitely many.
    """
    lists, longer = list[Any](), [list[Any]()]
    while longer:
        length = len(longer[0])
        lists += longer if length >= least else []
        if most is not None and length >= most:
            break
        values = prefix[length] if length < len(prefix) else rest
        if values is None:
            return None
        longer = [
            [*known, value] for known in longer for value in values if not any(_equal(value, one) for one in known)
        ]
        if len(lists) + len(longer) > MOST_LISTS:
            return None
    return lists
