"""Rewrites JSON schemas into equivalent ones of the keywords that llguidance compiles; free of torch.

A grammar has unions but no complements. So `not`, `oneOf`, conditions and dependencies become unions of schemas in
which the negation is carried out, where each keyword under it has a negation. Schemas that cannot be rewritten are
refused: leaving a keyword out would let through what the schema forbids. `format` is an assertion if the format is one
that llguidance knows, and otherwise an annotation, as the specification allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from shoestring.core.errors import ConfigError

Schema = bool | dict[str, Any]
Keywords = dict[str, Any]

TYPES = ("null", "boolean", "object", "array", "number", "string")
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
"""Formats that llguidance enforces."""
MOST = 20_000
"""Largest number of schemas that are rewritten and negated for one, a fraction of a second."""
LONGEST = 1 << 20
"""Largest number of characters of a rewritten schema."""
_ONE, _MANY = (
    ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
     "unevaluatedItems", "unevaluatedProperties"),
    ("allOf", "anyOf", "oneOf", "prefixItems", "items"),
)  # fmt: skip
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_SILENT = frozenset({
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions", "title", "description",
    "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema",
})  # fmt: skip
"""Keywords that allow every document."""
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}


def rewritten(schema: Keywords) -> Keywords:
    """An equivalent schema for llguidance; what it refers to is in its `$defs`.

    Raises:
        ConfigError: a keyword cannot be rewritten, a reference leads out of the schema, or the schema allows nothing.
    """
    rewriting, token = _Rewriting(schema), _left.set([MOST])
    try:
        result = rewriting.schema(schema)
        if result is False:
            raise ConfigError("no text has the format")
        definitions = rewriting.finish()
    finally:
        _left.reset(token)
    result = {} if isinstance(result, bool) else result
    return result | {"$defs": definitions} if definitions else result


_left: ContextVar[list[int]] = ContextVar("left")


def _count() -> None:
    """Count a schema: conditions in conditions can make exponentially many of one."""
    left = _left.get()
    left[0] -= 1
    if left[0] < 0:
        raise _refused("it is too long once its conditions are written out")


def written(schema: Keywords) -> str:
    """The JSON of the equivalent schema; see `rewritten`.

    Raises:
        ConfigError: it has more than `LONGEST` characters, too.
    """
    pieces, left = [], LONGEST
    for piece in json.JSONEncoder().iterencode(rewritten(schema)):  # which may be exponentially longer
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise _refused("it is too long once its conditions are written out")
    return "".join(pieces)


class _Rewriting:
    def __init__(self, root: Keywords) -> None:
        self.old = bool(re.search(r"draft-0[3-7]", str(root.get("$schema", ""))))
        """Whether keywords beside `$ref` have no effect, as up to draft 7."""
        self.root = root
        self.resources: dict[str, Any] = {}
        """The schemas that have URIs of their own, and those that have anchors, by their absolute URIs."""
        self.bases: dict[int, str] = {}
        """The base URI of each schema, by its identity."""
        self.dynamic: list[str] = []
        """The dynamic anchors, once for each schema that has it."""
        self.targets: list[Schema] = []
        """The schemas that others refer to."""
        self._find(root, "")

    def finish(self) -> dict[str, Schema]:
        """Rewrite the schemas that others refer to."""
        definitions: dict[str, Schema] = {}
        while len(definitions) < len(self.targets):
            definitions[f"r{len(definitions)}"] = self.schema(self.targets[len(definitions)])
        return definitions

    def _find(self, value: Any, base: str, *, named: bool = False) -> None:
        """Note the URIs of a schema and of those in it.

        Args:
            named: whether `value` is no schema, but an object of them.
        """
        if isinstance(value, dict) and not named:
            own = value.get("$id")
            if isinstance(own, str) and not (self.old and "$ref" in value):
                base = _join(base, own)
                self.resources.setdefault(base.removesuffix("#"), value)
                base = urldefrag(base).url
            elif value is self.root:
                self.resources.setdefault(base, value)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := value.get(key), str):
                    self.resources.setdefault(f"{base}#{name}", value)
                    self.dynamic += [name] if key == "$dynamicAnchor" else []
            self.bases[id(value)] = base
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in entries:
            if named or key not in ("const", "enum", "default", "examples"):
                self._find(part, base, named=not named and key in _NAMED)

    def _target(self, reference: Any, base: str) -> Schema:
        """The schema that a reference leads to."""
        if not isinstance(reference, str):
            raise _refused("a reference is not a text")
        uri = _join(base, reference)
        resource, _, fragment = uri.partition("#")
        target = self.resources.get(resource if not fragment or fragment[0] == "/" else uri)
        for step in fragment.split("/")[1:] if fragment[:1] == "/" else ():
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict):
                target = target.get(key)
            else:
                target = (
                    target[int(key)] if isinstance(target, list) and key.isdigit() and int(key) < len(target) else None
                )
        if not isinstance(target, bool | dict):
            raise _refused(f"the reference {reference[:80]!r} leads to nothing in the schema")
        return target

    def _named(self, target: Schema) -> Keywords:
        """A reference to a schema."""
        for number, known in enumerate(self.targets):
            if known is target:
                return {"$ref": f"#/$defs/r{number}"}
        self.targets.append(target)
        return {"$ref": f"#/$defs/r{len(self.targets) - 1}"}

    def schema(self, schema: Schema) -> Schema:
        """Rewrite a schema and those in it."""
        _count()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refused("a schema is neither an object nor true or false")
        base = self.bases.get(id(schema), "")
        if self.old and "$ref" in schema:
            return self._named(self._target(schema["$ref"], base))
        own = {key: value for key, value in schema.items() if key not in _SILENT}
        if (branches := self._branches(own)) is not None:
            for branch in branches:
                self.bases[id(branch)] = base
            return _either([self.schema(branch) for branch in branches])
        self._unevaluated(own, base)
        for key in _COUNTS:
            if isinstance(value := own.get(key), float) and value.is_integer():
                own[key] = int(value)
        for key in _ONE:
            if isinstance(own.get(key), bool | dict):
                own[key] = self.schema(own[key])
        for key in _MANY:
            if isinstance(own.get(key), list):
                own[key] = [self.schema(part) for part in own[key]]
        for key in _NAMED:
            if isinstance(own.get(key), dict):
                own[key] = {
                    name: self.schema(part) if isinstance(part, bool | dict) else part
                    for name, part in own[key].items()
                }
        targets = [self._target(own[key], base) for key in ("$ref", "$dynamicRef") if key in own]
        if self.dynamic.count(str(own.get("$dynamicRef")).partition("#")[2]) > 1:
            raise _refused("`$dynamicRef`, which may lead to one of several schemas")
        own.pop("$ref", None), own.pop("$dynamicRef", None)
        further = [part for step in _STEPS for part in step(own)]
        further += [self._named(target) for target in targets]
        if False in further:
            return False
        further = [part for part in further if part is not True]
        if len(further) == 1 and not own:
            return further[0]
        if further:
            own["allOf"] = [*own.get("allOf", []), *further]
        return own

    def _branches(self, own: Keywords) -> list[Keywords] | None:
        """Schemas one of which each document has: what is evaluated depends on the condition that it fulfils. None if
        there is no such condition, or no schema of what is not evaluated."""
        if not _unevaluating(own):
            return None
        rest = {key: value for key, value in own.items() if key not in ("if", "then", "else")}
        if "if" in own:
            then, otherwise = own.get("then", True), own.get("else", True)
            return [_with(rest, own["if"], then), _with(rest, {"not": own["if"]}, otherwise)]
        if needs := own.get("dependentSchemas"):
            (name, schema), *others = needs.items()
            rest = {key: value for key, value in own.items() if key != "dependentSchemas"}
            rest |= {"dependentSchemas": dict(others)} if others else {}
            return [_with(rest, {"properties": {name: False}}), _with(rest, {"required": [name]}, schema)]
        for key in ("anyOf", "oneOf"):
            if key in own and len(own[key]) <= (3 if key == "anyOf" else 16):
                rest, schemas = {name: value for name, value in own.items() if name != key}, own[key]
                return [
                    _with(rest, *(part if number in chosen else {"not": part} for number, part in enumerate(schemas)))
                    for count in range(1, len(schemas) + 1 if key == "anyOf" else 2)
                    for chosen in combinations(range(len(schemas)), count)
                ]
        return None

    def _unevaluated(self, own: Keywords, base: str) -> None:
        """What no other keyword evaluates is what is additional, if the others evaluate the same in every document."""
        if (rest := own.pop("unevaluatedProperties", True)) is not True and "additionalProperties" not in own:
            names, patterns = dict(own.get("properties", {})), dict(own.get("patternProperties", {}))
            for part in self._unconditional(own, base, "unevaluatedProperties", []):
                if "additionalProperties" in part or "unevaluatedProperties" in part:
                    break
                names = dict.fromkeys(part.get("properties", {}), True) | names
                patterns = dict.fromkeys(part.get("patternProperties", {}), True) | patterns
            else:
                own |= {"properties": names, "patternProperties": patterns, "additionalProperties": rest}
        if (rest := own.pop("unevaluatedItems", True)) is not True and "items" not in own:
            prefix = list(own.get("prefixItems", []))
            for part in self._unconditional(own, base, "unevaluatedItems", []):
                if "items" in part or "unevaluatedItems" in part:
                    break
                prefix += [True] * (len(part.get("prefixItems", [])) - len(prefix))
            else:
                own |= {"items": rest} | ({"prefixItems": prefix} if prefix else {})

    def _unconditional(self, own: Keywords, base: str, keyword: str, seen: list[Schema]) -> Iterator[Keywords]:
        """The schemas beside a schema that hold in each document that it allows. What is under `not` evaluates nothing.

        Raises:
            ConfigError: others evaluate a part of the documents, or refer to each other.
        """
        for key in ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "contains"):
            if key in own:
                raise _refused(f"`{keyword}` beside `{key}`")
        targets = [self._target(own[key], base) for key in ("$ref", "$dynamicRef") if key in own]
        for part in (*own.get("allOf", []), *targets):
            if any(part is known for known in seen):
                raise _refused(f"`{keyword}` beside a reference to itself")
            if isinstance(part, dict):
                yield part
                yield from self._unconditional(part, self.bases.get(id(part), base), keyword, [*seen, part])


def _join(base: str, reference: str) -> str:
    """The absolute URI of a reference; `urljoin` does not know schemes such as urn."""
    return urldefrag(base).url + reference if reference.startswith("#") else urljoin(base, reference)


def _with(own: Keywords, *schemas: Schema) -> Keywords:
    return own | {"allOf": [*own.get("allOf", []), *schemas]}


def _unevaluating(own: Keywords) -> bool:
    return any(own.get(key, True) is not True for key in ("unevaluatedProperties", "unevaluatedItems"))


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"{reason} cannot be expressed" if reason.startswith(("`", "the neg")) else reason)


# -- steps -------------------------------------------------------------------------------------------------------------


def _format(own: Keywords) -> Iterator[Schema]:
    if own.get("format") not in FORMATS:
        own.pop("format", None)
    if own.get("uniqueItems") is False or own.get("maxItems", 2) <= 1:
        own.pop("uniqueItems", None)
    yield True


def _condition(own: Keywords) -> Iterator[Schema]:
    condition, then, otherwise = own.pop("if", None), own.pop("then", True), own.pop("else", True)
    if condition is not None and (then is not True or otherwise is not True):
        yield _either([_both([condition, then]), _both([_not(condition), otherwise])])


def _negation(own: Keywords) -> Iterator[Schema]:
    if "not" in own:
        yield _not(own.pop("not"))


def _exclusive(own: Keywords) -> Iterator[Schema]:
    branches = own.pop("oneOf", None)
    if branches is None:
        return
    if all(_disjoint(one, other) for place, one in enumerate(branches) for other in branches[:place]):
        yield _either(branches)
        return
    yield _either([
        _both([one, *(_not(other) for place, other in enumerate(branches) if place != chosen)])
        for chosen, one in enumerate(branches)
    ])  # fmt: skip


def _dependencies(own: Keywords) -> Iterator[Schema]:
    for key in ("dependencies", "dependentSchemas", "dependentRequired"):
        for name, needs in (own.pop(key, None) or {}).items():
            then = {"required": needs} if isinstance(needs, list) else needs
            if then not in (True, {"required": []}):
                yield _either([{"properties": {name: False}}, then])


def _names(own: Keywords) -> Iterator[Schema]:
    """A schema of names becomes a pattern."""
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
            raise _refused(f"`propertyNames` with `{key}`")
        yield {"patternProperties": {pattern: True}, "additionalProperties": False}


def _contained(own: Keywords) -> Iterator[Schema]:
    least, most, contained = own.pop("minContains", 1), own.pop("maxContains", None), own.pop("contains", None)
    if contained is None or (least == 0 and most is None):
        return
    if contained is True or contained == {}:
        yield {"minItems": least} | ({} if most is None else {"maxItems": most})
    elif contained is False:
        yield {"type": [name for name in TYPES if name != "array"]} if least else True
    elif most == 0:
        yield {"items": _not(contained)} if least == 0 else {"type": [name for name in TYPES if name != "array"]}
    else:
        raise _refused("`contains`")


_STEPS = (_format, _condition, _negation, _exclusive, _dependencies, _names, _contained)
"""Each takes keywords out of a schema whose own schemas are rewritten, and yields schemas that hold as well."""


# -- negation ----------------------------------------------------------------------------------------------------------


def _both(schemas: list[Schema]) -> Schema:
    if False in schemas:
        return False
    wanted = [part for part in schemas if part not in (True, {})]
    return wanted[0] if len(wanted) == 1 else {"allOf": wanted} if wanted else True


def _either(schemas: list[Schema]) -> Schema:
    if True in schemas or {} in schemas:
        return True
    possible = [part for part in schemas if part is not False]
    return possible[0] if len(possible) == 1 else {"anyOf": possible} if possible else False


def _not(schema: Schema) -> Schema:
    """A schema of all documents that a rewritten schema does not allow.

    Raises:
        ConfigError: a keyword has no negation.
    """
    _count()
    if isinstance(schema, bool):
        return not schema
    return _either([part for key, value in schema.items() for part in _fails(key, value)])


def _fails(key: str, value: Any) -> Iterator[Schema]:
    """Schemas one of which each document has that a keyword does not allow."""
    if key in _SILENT:
        return
    if key == "type":
        names = {value} if isinstance(value, str) else set(value)
        if "integer" in names and "number" not in names:
            raise _refused("the negation of the type `integer`")
        yield {"type": others} if (others := [name for name in TYPES if name not in names]) else False
    elif key in ("const", "enum"):
        yield _unlike([value] if key == "const" else value)
    elif key == "required":
        yield from ({"type": "object", "properties": {name: False}} for name in value)
    elif key == "properties":
        for name, part in value.items():
            if (fails := _not(part)) is not False:
                yield {"type": "object", "required": [name], "properties": {name: fails}}
    elif key in _OPPOSITES:
        yield {"type": "number", _OPPOSITES[key]: value}
    elif key in _COUNTS and not key.endswith("Contains"):
        kind = {"Length": "string", "Items": "array"}.get(key[3:], "object")
        if key.startswith("max"):
            yield {"type": kind, f"min{key[3:]}": value + 1}
        elif value > 0:
            yield {"type": kind, f"max{key[3:]}": value - 1}
    elif key in ("prefixItems", "items") and isinstance(value, list):
        for number, part in enumerate(value):
            yield {"type": "array", "minItems": number + 1, "prefixItems": [*[True] * number, _not(part)]}
    elif key == "allOf":
        yield from map(_not, value)
    elif key == "anyOf":
        yield _both([_not(part) for part in value])
    else:
        raise _refused(f"the negation of `{key}`")


def _unlike(values: list[Any]) -> Schema:
    """A schema of all documents that are none of some values."""
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if any(isinstance(value, list | dict) for value in values):
        raise _refused("the negation of a list or an object")
    possible: list[Schema] = [{"type": ["object", "array"]}]
    possible += [{"const": value} for value in (True, False, None) if not any(value is part for part in values)]
    possible.append({"type": "string", "allOf": [{"pattern": _other(text)} for text in texts]})
    beside = [{"anyOf": [{"exclusiveMaximum": value}, {"exclusiveMinimum": value}]} for value in numbers]
    return {"anyOf": [*possible, {"type": "number", "allOf": beside}]}


def _other(text: str) -> str:
    """A regular expression of all texts but one."""
    pattern = "[\\s\\S]+"
    for character in reversed(text):
        one = re.escape(character)
        pattern = f"(?:[^{one}][\\s\\S]*|{one}(?:{pattern}))?"
    return f"^(?:{pattern})$"


def _disjoint(one: Schema, other: Schema) -> bool:
    """Whether it is certain that no document has both of two rewritten schemas."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    types = [_types(part) for part in (one, other)]
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    values = [_values(part) for part in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not any(_equal(left, right) for left in values[0] for right in values[1])
    shared = set(one.get("required", [])) & set(other.get("required", []))
    return _only(one, "object") and any(
        _disjoint(one.get("properties", {}).get(name, True), other.get("properties", {}).get(name, True))
        for name in shared
    )


def _only(schema: Keywords, name: str) -> bool:
    return _types(schema) == {name}


def _types(schema: Keywords) -> set[str] | None:
    value = schema.get("type")
    if value is None:
        return None
    return {"number" if name == "integer" else name for name in ([value] if isinstance(value, str) else value)}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON; in Python True == 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other
