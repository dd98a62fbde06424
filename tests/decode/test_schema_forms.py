"""Rewritten schemas allow what the schemas allow, by the library jsonschema, and texts of them are valid."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.decode import schema_forms, schema_sets, schema_steps
from shoestring.decode.constraint import Grammars
from shoestring.decode.schema_forms import rewritten, written
from shoestring.decode.settings.generation import AnswerFormat
from tests.shares import share

jsonschema = pytest.importorskip("jsonschema")

scalars = st.sampled_from([None, True, False, 0, 1, 2.5, -3, "", "a", "ab", "ü"])
names = st.sampled_from(["a", "b", "ab"])
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
types = st.sampled_from(["null", "boolean", "object", "array", "number", "string"])
counts = st.integers(0, 3)


def keywords(inner):
    """One keyword with its value; `then` and `else` belong to the condition."""
    single = {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "const": scalars,
        "enum": st.lists(scalars, min_size=1, max_size=3),
        "required": st.lists(names, max_size=2, unique=True),
        "properties": st.dictionaries(names, inner, max_size=2),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "a*", "b?"]), inner, max_size=2),
        "propertyNames": st.sampled_from([True, False, {"maxLength": 1}, {"minLength": 2}, {"enum": ["a", "ab"]},
                                          {"pattern": "^a"}, {"const": "b"}, {"type": "string"}]),
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(names, inner, max_size=2),
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "items": inner,
        "contains": inner,
        "minContains": st.sampled_from([0, 1, 2]),
        "maxContains": st.sampled_from([0, 1]),
        "uniqueItems": st.booleans(),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "$ref": st.sampled_from(["#/$defs/one", "#two"]),
        "pattern": st.sampled_from(["^a", "b"]),
        "minimum": st.sampled_from([0, 1.5]),
        "exclusiveMaximum": st.sampled_from([1, 2]),
        "format": st.sampled_from(["regex", "iri"]),
        **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems", "minProperties"], counts),
        "maxProperties": st.sampled_from([1, 2.0]),
    }  # fmt: skip
    return st.sampled_from(list(single)).flatmap(lambda name: single[name].map(lambda value: (name, value)))


def schema_of(inner):
    return st.lists(keywords(inner), max_size=4).map(dict)


KEYWORDS = (
    "type", "const", "enum", "required", "properties", "patternProperties", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "prefixItems", "items", "contains", "minContains", "maxContains", "uniqueItems",
    "allOf", "anyOf", "oneOf", "not", "if", "then", "unevaluatedProperties", "unevaluatedItems", "$ref", "$dynamicRef",
    "$id", "$anchor", "$defs", "$schema", "minimum", "maxItems", "format", "pattern",
)  # fmt: skip
schemas = st.recursive(st.booleans() | st.just({}), lambda inner: schema_of(inner), max_leaves=12)


def with_definitions(schema, first, second):
    return {"$defs": {"one": first, "two": {"$anchor": "two", **second}}, **schema}


objects = schemas.filter(lambda schema: isinstance(schema, dict))
simple = st.fixed_dictionaries({}, optional={"type": types, "required": st.just(["a"]), "maxLength": counts})
roots = st.builds(with_definitions, objects.filter(bool), simple, simple)


def differs(schema, document):
    """Whether a schema and its rewritten form judge a document otherwise; None if the schema is refused."""
    try:
        found = rewritten(schema)
    except ConfigError as error:
        if "no text" not in str(error):
            return None
        found = False
    judges = [jsonschema.Draft202012Validator(each).is_valid(document) for each in (schema, found)]
    return judges[0] is not judges[1]


@pytest.mark.slow
@settings(max_examples=400)
@given(schema=roots, drawn=st.lists(documents, min_size=4, max_size=4))
def test_the_rewritten_schema_allows_the_same_documents(schema, drawn):
    assert not any(differs(schema, document) for document in drawn)


@pytest.mark.slow
@settings(max_examples=share(8000, 2000))
@given(schema=roots, drawn=st.lists(documents, min_size=4, max_size=4))
def test_many_rewritten_schemas_allow_the_same_documents(schema, drawn):
    assert not any(differs(schema, document) for document in drawn)


TAGGED = [{"type": "object", "required": ["kind"], "properties": {"kind": {"const": name}}} for name in "ab"]
FAULTS = {  # a function that is wrong -> a schema and a document that show it
    "disjoint": (lambda *_: True, {"oneOf": [{"minimum": 0}, {"minimum": 1}]}, 2),
    "complement": (lambda schema: True, {"not": {"type": "null"}}, None),
    "_dependencies": (lambda own: iter([own.pop("dependentRequired", None) and True]),
                      {"dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "_names": (lambda own: iter([own.pop("propertyNames", None) and True]), {"propertyNames": {"maxLength": 1}},
               {"ab": 1}),
    "_patterns": (lambda own: iter([own.pop("patternProperties", True) and True]),
                  {"patternProperties": {"a*": {"type": "null"}}}, {"b": 1}),
    "_contained": (lambda own: iter([own.pop("contains", None) and True]),
                   {"contains": {"const": 1}, "minContains": 2, "maxContains": 1}, [1]),
    "_distinct": (lambda own: iter([own.pop("uniqueItems", True) and True]),
                  {"items": {"enum": [1, True]}, "uniqueItems": True}, [True, 1, 1]),
    "_equal": (lambda one, other: one == other, {"items": {"enum": [1, True]}, "uniqueItems": True}, [True, 1]),
    "_unlike": (lambda values: {"type": "number"}, {"not": {"const": "a"}}, "b"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_step_shows(name, monkeypatch):
    fault, schema, document = FAULTS[name]
    assert differs(schema, document) is False
    for module in (schema_forms, schema_sets, schema_steps):
        monkeypatch.setattr(module, name, fault, raising=False)
    monkeypatch.setattr(schema_forms, "STEPS", tuple(
        fault if step.__name__ == name else step for step in schema_steps.STEPS
    ))  # fmt: skip
    assert differs(schema, document) is True


def test_tagged_unions_stay_as_they_are():
    assert rewritten({"oneOf": TAGGED}) == {"anyOf": TAGGED}


def test_an_old_reference_hides_what_stands_beside_it():
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"type": "null"}}}
    found = rewritten({**old, "properties": {"a": {"$ref": "#/definitions/n", "maxLength": 0}}})
    assert found["properties"]["a"] == {"$ref": "#/$defs/r0"} and found["$defs"] == {"r0": {"type": "null"}}


def lists_of(count, **further):
    return {"type": "array", "items": {"enum": list(range(count))}, "uniqueItems": True, **further}


@pytest.mark.parametrize(("schema", "lists"), [
    (lists_of(0), 1), (lists_of(1), 2), (lists_of(3), 16), (lists_of(5), 326), (lists_of(9, maxItems=2), 82),
    (lists_of(4, minItems=4), 24), (lists_of(2, minItems=3), 0),
])  # fmt: skip
def test_lists_without_repetition_are_written_out(schema, lists):
    try:
        (_, written_out) = rewritten(schema)["allOf"][0]["anyOf"]
    except KeyError:
        written_out = {"enum": []}
    assert len(written_out["enum"]) == lists


def test_many_lists_without_repetition_are_refused():
    grammars = Grammars(byte_tokenizer().engine.to_str(), 257, [256])
    for schema in (lists_of(6), lists_of(30, maxItems=2), {"uniqueItems": True, "items": {"type": "string"}}):
        with pytest.raises(ConfigError, match="uniqueItems"):
            grammars.compile(AnswerFormat("json_schema", written(schema)))


@pytest.mark.parametrize("pattern", ["", "a*", "a?b*", ".*", "^a*", "^"])
def test_a_pattern_of_all_names_is_one_of_all_properties(pattern):
    found = rewritten({"patternProperties": {pattern: {"type": "null"}, "^b": True}, "additionalProperties": False})
    assert found == {"additionalProperties": {"type": "null"}}


@pytest.mark.parametrize("pattern", ["a*$", "^a*$", "a+", "a{,3}", "[]a]*", "\\b", "(?=a)", "a|"])
def test_other_patterns_stay(pattern):
    schema = {"patternProperties": {pattern: {"type": "null"}}}
    assert rewritten(schema) == schema


@pytest.mark.parametrize(("schema", "words"), [
    ({"$schema": "https://example.com/dialect", "type": "null"}, "dialect"),
    ({"contains": {"const": 1}}, "contains"),
    ({"not": {"pattern": "a"}}, "negation of `pattern`"),
    ({"$ref": "https://example.com/a.json"}, "leads to nothing"),
    ({"$ref": "#/$defs/none"}, "leads to nothing"),
    ({"$ref": 5}, "not a text"),
    ({"properties": {"a": 3}}, None),
    ({"items": "x"}, None),
    ({"not": {}}, "no text"),
])  # fmt: skip
def test_what_cannot_be_rewritten_is_refused(schema, words):
    if words is None:  # llguidance refuses it
        schema = rewritten(schema)
        grammars = Grammars(byte_tokenizer().engine.to_str(), 257, [256])
        with pytest.raises(ConfigError):
            grammars.compile(AnswerFormat("json_schema", json.dumps(schema)))
        return
    with pytest.raises(ConfigError, match=words):
        rewritten(schema)


values = st.recursive(
    scalars | names, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2)
)


@given(st.recursive(values, lambda inner: st.dictionaries(st.sampled_from(sorted(KEYWORDS)), inner, max_size=3)))
def test_what_is_no_schema_is_refused_in_one_line(content):
    schema = content if isinstance(content, dict) else {"not": content}
    try:
        written(schema)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_what_becomes_too_long_is_refused():
    schema = {"type": "object"}
    for _ in range(12):
        schema = {"oneOf": [{"properties": {"a": schema}}, {"properties": {"b": schema}}, {"maxProperties": 2}]}
    with pytest.raises(ConfigError, match="too long"):
        written(schema)
