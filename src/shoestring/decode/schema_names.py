"""Names of properties that a schema does not list, as regular expressions; free of torch.

Where properties or patterns are listed, llguidance lets each other name be written with any escapes of JSON, and
compares names as they are written: `"\\u0062"` passes for a name other than `b`. Names that fit a pattern are written
in one way only, control characters aside. So what is additional becomes a pattern: of all names, from which llguidance
takes those of properties, or of those that fit no other pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoestring.decode.name_patterns import complement_of, disjoint_patterns, exactly, other_names
from shoestring.decode.schema_sets import Keywords, bounded, refused

_SCHEMAS = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "prefixItems")
_NAMED = ("$defs", "patternProperties", "properties")
_ESCAPED = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that JSON writes as one of several escapes."""


def with_written_names(schema: Keywords) -> Keywords:
    """Make the names of additional properties in a rewritten schema and those in it the names of patterns.

    Raises:
        ConfigError: the complement of a pattern is not known here, or a name has control characters beside patterns.
    """
    escaped = {name for name in _keys(schema, "properties") if _ESCAPED.search(name)}
    shared = sorted(set(_keys(schema, "patternProperties")))
    with bounded():
        if not disjoint_patterns([*shared, *map(exactly, escaped)]):
            shared = []
        return _rewritten(schema, sorted(escaped), shared)


def _inner(own: Keywords) -> Iterator[tuple[str, Any]]:
    """The keywords whose values are schemas, lists of schemas or named schemas."""
    for keys, kind in ((_SCHEMAS, dict), (_LISTS, list), (_NAMED, dict)):
        for key in keys:
            if isinstance(own.get(key), kind):
                yield key, own[key]


def _keys(schema: Any, keyword: str) -> Iterator[str]:
    """The names of all properties of a schema, or all patterns."""
    if not isinstance(schema, dict):
        return
    for key, value in _inner(schema):
        if key == keyword:
            yield from value
        parts = value if isinstance(value, list) else value.values() if key in _NAMED else [value]
        for part in parts:
            yield from _keys(part, keyword)


def _rewritten(schema: Any, escaped: Sequence[str], shared: Sequence[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    own = dict(schema)
    for key, value in _inner(schema):
        if isinstance(value, list):
            own[key] = [_rewritten(part, escaped, shared) for part in value]
        elif key in _NAMED:
            own[key] = {name: _rewritten(part, escaped, shared) for name, part in value.items()}
        else:
            own[key] = _rewritten(value, escaped, shared)
    return _adjacent(own | _patterns(own, escaped, shared))


def _adjacent(own: Keywords) -> Keywords:
    """Put patterns and what is additional beside the properties, because llguidance reads what stands on the two sides
    of keywords such as `allOf` as schemas of their own."""
    if "patternProperties" not in own:
        return own
    together = ("properties", "patternProperties", "additionalProperties")
    objects = {key: own[key] for key in together if key in own}
    if "properties" not in own:
        return objects | own
    place = list(own).index("properties")
    before = {key: value for key, value in list(own.items())[:place] if key not in objects}
    return before | objects | own


def _patterns(own: Keywords, escaped: Sequence[str], shared: Sequence[str]) -> Keywords:
    """Keywords in place of those that allow additional properties.

    Objects that hold together get the same patterns where that is possible, because llguidance combines no others.

    Args:
        escaped: names of properties in the document that are written in several ways.
        shared: patterns in the document, of which each name fits one at most.
    """
    names, patterns = own.get("properties") or {}, own.get("patternProperties") or {}
    rest = own.get("additionalProperties", True)
    if not isinstance(names, Mapping) or not isinstance(patterns, Mapping):
        return {}  # llguidance refuses it
    if patterns and not shared and any(name in names for name in escaped):
        raise refused("a name with control characters beside `patternProperties`")
    if rest is False or not (names or patterns):
        return {}
    # The schema of a pattern holds for the properties that fit it, too.
    own_names = [] if rest in (True, {}) else list(names)
    further = [pattern for pattern in shared if pattern not in patterns]
    if own_names and not disjoint_patterns([*further, *map(exactly, own_names)]):
        further = []
    patterns = {pattern: patterns.get(pattern, rest) for pattern in (*patterns, *further)}
    exact = {exactly(name): names.get(name, rest) for name in escaped} if shared or not patterns else {}
    others = (
        complement_of([*patterns, *exact, *map(exactly, own_names)])
        if patterns
        else other_names([*own_names, *escaped])
    )
    remaining = {} if others is None else {others: rest}
    return {"patternProperties": {**patterns, **exact, **remaining}, "additionalProperties": False}
