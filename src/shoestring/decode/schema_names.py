"""Writes the names of properties that a schema does not list as regular expressions; does not import torch.

If a schema lists properties or patterns, llguidance accepts any JSON spelling of all other names, and compares only
spellings: `"\\u0062"` then passes for a name other than `b`. A name that matches a pattern has only one spelling,
except for control characters. Additional properties are therefore described by a pattern, which matches either all
names (of which llguidance excludes the listed ones) or only the names that match no other pattern.
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
"""Control characters, each of which has several spellings in JSON."""


def with_written_names(schema: Keywords) -> Keywords:
    """Describe additional properties by patterns, in a rewritten schema and all schemas inside it.

    Raises:
        ConfigError: a pattern has no known complement, or a property beside patterns has control characters in it.
    """
    escaped = {name for name in _keys(schema, "properties") if _ESCAPED.search(name)}
    shared = sorted(set(_keys(schema, "patternProperties")))
    with bounded():
        if not disjoint_patterns([*shared, *map(exactly, escaped)]):
            shared = []
        return _rewritten(schema, sorted(escaped), shared)


def _inner(own: Keywords) -> Iterator[tuple[str, Any]]:
    """Yield the keywords whose values contain schemas: a schema, a list of schemas, or an object of schemas."""
    for keys, kind in ((_SCHEMAS, dict), (_LISTS, list), (_NAMED, dict)):
        for key in keys:
            if isinstance(own.get(key), kind):
                yield key, own[key]


def _keys(schema: Any, keyword: str) -> Iterator[str]:
    """Yield all property names, or all patterns, in a schema and the schemas inside it; `keyword` says which."""
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
    # Move patterns and additional properties next to the properties, because llguidance treats the keywords before and
    # after a keyword such as `allOf` as separate schemas.
    own = own | _patterns(own, escaped, shared)
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
    """The keywords that replace the patterns and additional properties of a schema; {} if nothing changes.

    Where possible, all schemas get the same patterns: several schemas may apply to the same object, and llguidance
    cannot combine different patterns.

    Args:
        escaped: names of properties, anywhere in the document, that have several spellings in JSON.
        shared: patterns from anywhere in the document, if every name matches at most one of them.
    """
    names, patterns = own.get("properties") or {}, own.get("patternProperties") or {}
    rest = own.get("additionalProperties", True)
    if not isinstance(names, Mapping) or not isinstance(patterns, Mapping):
        return {}  # llguidance refuses such a schema
    if patterns and not shared and any(name in names for name in escaped):
        raise refused("a name with control characters beside `patternProperties`")
    if rest is False or not (names or patterns):
        return {}
    # A pattern's schema also applies to listed properties that match it, so the new patterns must exclude these names.
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
