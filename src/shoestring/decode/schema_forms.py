"""Rewrites JSON schemas as equivalent schemas with only keywords that llguidance supports; does not import torch.

Grammars can express unions but not complements. Therefore `not`, `oneOf`, conditions and dependencies are rewritten as
unions of schemas in which each negated keyword is replaced by its opposite, if it has one. A schema that cannot be
rewritten is refused: dropping the unsupported keyword would allow documents that the schema forbids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from shoestring.core.errors import ConfigError
from shoestring.decode.schema_names import with_written_names
from shoestring.decode.schema_sets import COUNTS, SILENT, Keywords, Schema, bounded, count, either, refused
from shoestring.decode.schema_steps import STEPS

DIALECTS = ("json-schema.org", "spec.openapis.org")
"""Hosts that define the supported dialects of JSON Schema."""
LONGEST = 1 << 20
"""Largest number of characters of a rewritten schema."""
_ONE, _MANY = (
    ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
     "unevaluatedItems", "unevaluatedProperties"),
    ("allOf", "anyOf", "oneOf", "prefixItems", "items"),
)  # fmt: skip
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


def rewritten(schema: Keywords) -> Keywords:
    """Rewrite a schema for llguidance; all schemas that the result refers to are in its `$defs`.

    Raises:
        ConfigError: a keyword cannot be rewritten, a reference leads out of the schema, or the schema allows nothing.
    """
    try:
        with bounded():
            rewriting = _Rewriting(schema)
            result = rewriting.schema(schema)
            definitions = rewriting.finish()
    except (TypeError, AttributeError, ValueError) as error:  # the value of a keyword has a wrong type
        raise ConfigError("it is not a valid schema") from error
    if result is False:
        raise ConfigError("no text has the format")
    result = {} if isinstance(result, bool) else result
    return result | {"$defs": definitions} if definitions else result


def written(schema: Keywords) -> str:
    """The JSON of the equivalent schema; see `rewritten` and `with_written_names`.

    Raises:
        ConfigError: the same as for `rewritten`, or the JSON has more than `LONGEST` characters.
    """
    pieces, left = [], LONGEST
    exact = with_written_names(rewritten(schema))
    for piece in json.JSONEncoder().iterencode(exact):  # the JSON may be exponentially longer than the schema
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise refused("it is too long once its conditions are written out")
    return "".join(pieces)


class _Rewriting:
    def __init__(self, root: Keywords) -> None:
        dialect = str(root.get("$schema", ""))
        if urlsplit(dialect).hostname not in (None, *DIALECTS):
            raise refused(f"the dialect {dialect[:80]!r} is not known")
        self.old = bool(re.search(r"draft-0[3-7]", dialect))
        """Whether `$ref` disables all keywords beside it, as in draft 7 and earlier."""
        self.root = root
        self.resources: dict[str, Any] = {}
        """Schemas that have a URI or an anchor of their own, by absolute URI."""
        self.bases: dict[int, str] = {}
        """The base URI of each schema, by the `id()` of the schema."""
        self.dynamic: list[str] = []
        """Names of dynamic anchors; a name occurs once for each schema that defines it."""
        self.targets: list[Schema] = []
        """Schemas that other schemas refer to, in the order of their entries in `$defs`."""
        self._find(root, "")

    def finish(self) -> dict[str, Schema]:
        """Rewrite the schemas that other schemas refer to; returns the entries of `$defs`."""
        definitions: dict[str, Schema] = {}
        while len(definitions) < len(self.targets):
            definitions[f"r{len(definitions)}"] = self.schema(self.targets[len(definitions)])
        return definitions

    def _find(self, value: Any, base: str, *, named: bool = False) -> None:
        """Record the URIs and anchors of a schema and of all schemas inside it.

        Args:
            named: whether `value` is not a schema, but an object whose values are schemas.
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
        """The schema that a reference points to."""
        if not isinstance(reference, str):
            raise refused("a reference is not a text")
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
            raise refused(f"the reference {reference[:80]!r} leads to nothing in the schema")
        return target

    def _targets(self, own: Keywords, base: str) -> list[Schema]:
        """The schemas that the references among the keywords point to."""
        return [self._target(own[key], base) for key in ("$ref", "$dynamicRef") if key in own]

    def _named(self, target: Schema) -> Schema:
        """Make a reference to a schema; `finish` rewrites this schema for `$defs`."""
        if isinstance(target, bool):
            return target
        for number, known in enumerate(self.targets):
            if known is target:
                return {"$ref": f"#/$defs/r{number}"}
        self.targets.append(target)
        return {"$ref": f"#/$defs/r{len(self.targets) - 1}"}

    def schema(self, schema: Schema) -> Schema:
        """Rewrite a schema and all schemas inside it."""
        count()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refused("a schema is neither an object nor true or false")
        base = self.bases.get(id(schema), "")
        if self.old and "$ref" in schema:
            return self._named(self._target(schema["$ref"], base))
        own = {key: value for key, value in schema.items() if key not in SILENT}
        if (branches := self._branches(own)) is not None:
            for branch in branches:
                self.bases[id(branch)] = base
            return either([self.schema(branch) for branch in branches])
        self._unevaluated(own, base)
        self._rewrite_values(own)
        targets = self._targets(own, base)
        if self.dynamic.count(str(own.get("$dynamicRef")).partition("#")[2]) > 1:
            raise refused("`$dynamicRef`, which may lead to one of several schemas")
        own.pop("$ref", None), own.pop("$dynamicRef", None)
        further = [part for step in STEPS for part in step(own)]
        further += [self._named(target) for target in targets]
        if False in further:
            return False
        further = [part for part in further if part is not True]
        if len(further) == 1 and not own:
            return further[0]
        if further:
            own["allOf"] = [*own.get("allOf", []), *further]
        return own

    def _rewrite_values(self, own: Keywords) -> None:
        """Rewrite the schemas that are values of keywords, in place, and make counts such as 2.0 integers."""
        for key in COUNTS:
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

    def _branches(self, own: Keywords) -> list[Keywords] | None:
        """Divide a schema with an `unevaluated…` keyword into cases, one for each outcome of a condition, because the
        outcome determines what is evaluated. None if the schema has no such keyword or no condition."""
        if all(own.get(key, True) is True for key in ("unevaluatedProperties", "unevaluatedItems")):
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
        """Replace `unevaluated…` keywords by `additionalProperties` and `items`, if there are no conditions."""
        if (rest := own.pop("unevaluatedProperties", True)) is not True and "additionalProperties" not in own:
            names, patterns = dict(own.get("properties", {})), dict(own.get("patternProperties", {}))
            for part in self._unconditional(own, base, "unevaluatedProperties", []):
                if "additionalProperties" in part or "unevaluatedProperties" in part:
                    break
                names |= {name: True for name in part.get("properties", {}) if name not in names}
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
        """Yield the schemas in `allOf` and behind references, which hold in every document that the schema allows. The
        schema under `not` is left out, because it evaluates nothing.

        Raises:
            ConfigError: a keyword such as `anyOf` holds schemas that apply only to some documents, or schemas refer to
                each other.
        """
        for key in ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "contains"):
            if key in own:
                raise refused(f"`{keyword}` beside `{key}`")
        for part in (*own.get("allOf", []), *self._targets(own, base)):
            if any(part is known for known in seen):
                raise refused(f"`{keyword}` beside a reference to itself")
            if isinstance(part, dict):
                yield part
                yield from self._unconditional(part, self.bases.get(id(part), base), keyword, [*seen, part])


def _join(base: str, reference: str) -> str:
    """Resolve a reference to an absolute URI; `urljoin` cannot add fragments to URIs of schemes such as urn."""
    return urldefrag(base).url + reference if reference.startswith("#") else urljoin(base, reference)


def _with(own: Keywords, *schemas: Schema) -> Keywords:
    return own | {"allOf": [*own.get("allOf", []), *schemas]}
