"""Steps that remove keywords that llguidance does not support from a JSON schema; does not import torch.

Each step removes keywords from a schema whose inner schemas have been rewritten (see `schema_forms`), and yields the
schemas that must hold in place of these keywords. A `format` that llguidance knows restricts the values; any other
`format` is only an annotation, as the specification allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoestring.decode.schema_sets import (
    TYPES,
    Keywords,
    Schema,
    both,
    complement,
    disjoint,
    either,
    refused,
    unique,
    values_of,
)

FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
"""Formats that llguidance enforces."""
_EVERY_NAME = re.compile(r"\^?(?:[\w.][*?])*", re.ASCII)
"""Matches regular expressions that match every text, because they match the empty text at its beginning."""


def _format(own: Keywords) -> Iterator[Schema]:
    if own.get("format") not in FORMATS:
        own.pop("format", None)
    if own.get("uniqueItems") is False or own.get("maxItems", 2) <= 1:
        own.pop("uniqueItems", None)
    yield True


def _condition(own: Keywords) -> Iterator[Schema]:
    condition, then, otherwise = own.pop("if", None), own.pop("then", True), own.pop("else", True)
    if condition is not None and (then is not True or otherwise is not True):
        yield either([both([condition, then]), both([complement(condition), otherwise])])


def _negation(own: Keywords) -> Iterator[Schema]:
    if "not" in own:
        yield complement(own.pop("not"))


def _exclusive(own: Keywords) -> Iterator[Schema]:
    branches = own.pop("oneOf", None)
    if branches is None:
        return
    if all(disjoint(one, other) for place, one in enumerate(branches) for other in branches[:place]):
        yield either(branches)
        return
    yield either([
        both([one, *(complement(other) for place, other in enumerate(branches) if place != chosen)])
        for chosen, one in enumerate(branches)
    ])  # fmt: skip


def _dependencies(own: Keywords) -> Iterator[Schema]:
    for key in ("dependencies", "dependentSchemas", "dependentRequired"):
        for name, needs in (own.pop(key, None) or {}).items():
            then = {"required": needs} if isinstance(needs, list) else needs
            if then not in (True, {"required": []}):
                yield either([{"properties": {name: False}}, then])


def _names(own: Keywords) -> Iterator[Schema]:
    """Replace `propertyNames` by patterns."""
    names = own.pop("propertyNames", True)
    if names is False:
        yield {"maxProperties": 0}
    if isinstance(names, bool):
        return
    for key, value in names.items():
        if key == "pattern":
            pattern = value
        elif key in ("minLength", "maxLength"):
            pattern = f"^[\\s\\S]{{{value},}}$" if key == "minLength" else f"^[\\s\\S]{{0,{value}}}$"
        elif key in ("const", "enum"):
            known = [part for part in ([value] if key == "const" else value) if isinstance(part, str)]
            pattern = "^(?:" + "|".join(re.escape(part) for part in known) + ")$"
            if not known:
                yield {"maxProperties": 0}
                continue
        elif key == "type" and "string" in ([value] if isinstance(value, str) else value):
            continue
        elif key == "type":
            yield {"maxProperties": 0}
            continue
        else:
            raise refused(f"`propertyNames` with `{key}`")
        yield {"patternProperties": {pattern: True}, "additionalProperties": False}


def _patterns(own: Keywords) -> Iterator[Schema]:
    """Remove patterns where possible, because llguidance accepts patterns only if no name matches two of them. A
    pattern that matches every name becomes a schema of all properties. A pattern that allows every value is removed,
    unless restrictions on additional properties would then apply to its properties."""
    patterns = own.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    every = {pattern for pattern in patterns if _EVERY_NAME.fullmatch(pattern)}
    yield from ({"additionalProperties": patterns[pattern]} for pattern in every)
    if every:  # every property then matches a pattern, so none is additional
        own.pop("additionalProperties", None)
    if own.get("additionalProperties", True) is True:
        every |= {pattern for pattern, part in patterns.items() if part is True}
    own["patternProperties"] = {pattern: part for pattern, part in patterns.items() if pattern not in every}
    if not own["patternProperties"]:
        own.pop("patternProperties")


def _distinct(own: Keywords) -> Iterator[Schema]:
    """Replace `uniqueItems` by an enumeration of all lists, if there are few."""
    if own.get("uniqueItems") is not True:
        return
    prefix, rest = own.get("prefixItems", []), own.get("items", True)
    if isinstance(rest, list):  # as in draft 7 and earlier
        prefix, rest = rest, own.get("additionalItems", True)
    lists = unique([values_of(part) for part in prefix], values_of(rest), own.get("minItems", 0), own.get("maxItems"))
    if lists is None:
        return  # llguidance then refuses the schema
    for key in ("uniqueItems", "items", "additionalItems", "prefixItems", "minItems", "maxItems"):
        own.pop(key, None)
    yield either([{"type": [name for name in TYPES if name != "array"]}, {"enum": lists} if lists else False])


def _contained(own: Keywords) -> Iterator[Schema]:
    least, most, contained = own.pop("minContains", 1), own.pop("maxContains", None), own.pop("contains", None)
    if contained is None or (least == 0 and most is None):
        return
    if most is not None and most < least:
        yield {"type": [name for name in TYPES if name != "array"]}
    elif contained is True or contained == {}:
        yield {"minItems": least} | ({} if most is None else {"maxItems": most})
    elif contained is False:
        yield {"type": [name for name in TYPES if name != "array"]} if least else True
    elif most == 0:
        yield {"items": complement(contained)} if least == 0 else {"type": [name for name in TYPES if name != "array"]}
    else:
        raise refused("`contains`")


STEPS = (_format, _condition, _negation, _exclusive, _dependencies, _names, _patterns, _contained, _distinct)
