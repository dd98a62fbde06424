"""Names of properties are judged as what they spell, whatever escapes they are written with."""

import json
import re
import time
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.decode import name_patterns
from shoestring.decode.constraint import Grammars
from shoestring.decode.name_patterns import complement_of, disjoint_patterns, exactly, other_names
from shoestring.decode.schema_forms import written
from shoestring.decode.schema_names import with_written_names
from shoestring.decode.schema_sets import bounded
from shoestring.decode.settings.generation import AnswerFormat

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

NULL, TEXT = {"type": "null"}, {"type": "string"}
SHORT = {"\n": "\\n", "\t": "\\t", "\b": "\\b", '"': '\\"', "\\": "\\\\", "/": "\\/"}


@cache
def grammars():
    tokenizer = byte_tokenizer()
    return tokenizer, Grammars(tokenizer.engine.to_str(), tokenizer.vocab_size, tokenizer.ends)


def can_be_written(schema, text):
    """Whether the masks of a schema allow each byte of a text, and then the end."""
    tokenizer, compiled = grammars()
    tokens = tokenizer.encode(text)
    constraint = compiled.compile(AnswerFormat("json_schema", written(schema))).start()
    allowed = constraint.allowed([], tokens, tokenizer.vocab_size)
    return all(allowed[place, token] for place, token in enumerate([*tokens, tokenizer.end_of_text]))


def spellings(name):
    """Texts of a name in JSON: its characters as they are, with their short escapes, or as code points."""
    ways = [
        [*([] if char < " " or char in '"\\' else [char]), f"\\u{ord(char):04x}", f"\\u{ord(char):04X}"]
        + ([SHORT[char]] if char in SHORT else [])
        for char in name
    ]
    return {f'"{"".join(parts)}"' for parts in product(*ways)}


def judge(schema, names, values=(None, 1, "a")):
    """Hold what can be written to the library jsonschema's verdict: nothing invalid, and all that is valid."""
    validator = jsonschema.Draft202012Validator(schema)
    for name, value in product(names, values):
        valid = validator.is_valid({name: value})
        texts = {f"{{{spelling}: {json.dumps(value)}}}" for spelling in spellings(name)}
        through = [text for text in texts if can_be_written(schema, text)]
        assert bool(through) == valid, (name, value, through)


@pytest.mark.parametrize("schema", [
    {"patternProperties": {"f.*": True, "b.*": False}},
    {"patternProperties": {"^f": TEXT, "^b": False}},
    {"patternProperties": {"^b": NULL}, "additionalProperties": TEXT},
    {"patternProperties": {"^b": NULL}, "additionalProperties": False},
    {"patternProperties": {"[^a-zé]": False}},
    {"patternProperties": {"b": NULL}, "properties": {"b": {}, "f": TEXT}, "additionalProperties": {"minimum": 0}},
    {"patternProperties": {"[a-f]": {}}, "required": ["b"]},
    {"properties": {"b": False}},
    {"properties": {"b": NULL, "fo": TEXT}},
    {"properties": {"b": NULL, "f": NULL}, "additionalProperties": TEXT},
    {"properties": {"\n": NULL, "b": TEXT, "\x7f": TEXT, "\x1f": NULL}},
    {"properties": {"\n": NULL}, "additionalProperties": TEXT, "allOf": [{"properties": {"b": False}}]},
    {"allOf": [{"properties": {"b": NULL}}, {"properties": {"\n": NULL}}, {"properties": {"f": False}}]},
    {"properties": {"/": NULL, '"': NULL, "\\": NULL, "é": NULL}},
    {"if": {"required": ["b"]}, "then": {"properties": {"f": False}}, "else": {"properties": {"f": NULL}}},
    {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"maxLength": 1}, "properties": {"b": NULL, "f": TEXT}},
    {"patternProperties": {"\n": NULL}, "properties": {"\x1f": TEXT}},
    {"allOf": [{"patternProperties": {"^f": NULL}}, {"patternProperties": {"^b": TEXT}}, {"properties": {"b": {}}}]},
    {"patternProperties": {"^b": NULL}, "allOf": [{"properties": {"f": NULL}}], "additionalProperties": TEXT},
    {"additionalProperties": False, "allOf": [{"maxProperties": 1}], "patternProperties": {"^b": NULL}},
    {"additionalProperties": False, "anyOf": [{}, {"maxProperties": 1}], "patternProperties": {"^b": NULL},
     "allOf": [{"required": ["f"]}], "properties": {"f": TEXT}},
    {"dependentRequired": {"b": ["f"]}, "dependentSchemas": {"\n": {"properties": {"b": NULL}}}},
])  # fmt: skip
def test_a_name_is_judged_by_what_it_spells(schema):
    judge(schema, ["b", "f", "fo", "fb", "", "\n", "\x1f", "\x7f", "/", '"', "\\", "é"])


PATTERNS = ["a", "^a", "a$", "^a*$", "b.", "[^a]", "^(?:ab?|\\W)$", ".*", "\\.|b"]
parts = st.sampled_from([True, False, NULL, TEXT])


objects = st.fixed_dictionaries({}, optional={
    "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), parts, max_size=2),
    "properties": st.dictionaries(st.sampled_from(["a", "ab"]), parts, max_size=2),
    "additionalProperties": parts,
    "required": st.just(["a"]),
})  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60)
@given(schema=objects | st.builds(lambda one, other: one | {"allOf": [other]}, objects, objects))
def test_patterns_and_properties_that_overlap_are_exact_or_refused(schema):
    names = ["".join(letters) for length in range(3) for letters in product("ab.", repeat=length)]
    try:
        grammars()[1].compile(AnswerFormat("json_schema", written(schema)))
    except ConfigError as error:
        assert re.search("not disjoint|no text|Unsatisfiable", str(error))
        return
    judge(schema, names, (None, "a"))


@pytest.mark.parametrize("schema", [
    {"patternProperties": {"a": NULL, "b": {"maxLength": 1}}},
    {"propertyNames": {"pattern": "^[a-f]"}, "properties": {"b": NULL}, "additionalProperties": TEXT},
])  # fmt: skip
def test_patterns_that_overlap_and_demand_something_are_refused(schema):
    with pytest.raises(ConfigError, match="not disjoint"):
        can_be_written(schema, "{}")


@pytest.mark.parametrize("schema", [
    {"properties": ["a"]}, {"patternProperties": [{}]}, {"patternProperties": {"a": 3}}, {"properties": {"a": [1]}},
    {"patternProperties": 5, "properties": {"a": NULL}}, {"allOf": {"properties": {"a": 1}}},
])  # fmt: skip
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(ConfigError):
        can_be_written(schema, "{}")


def test_work_is_bounded():
    hard = {f"n{number}": {"patternProperties": {f"a.{{{number % 4}}}b": False}} for number in range(400)}
    began = time.process_time()
    with pytest.raises(ConfigError, match="too long"):
        written({"properties": hard})
    assert time.process_time() - began < 10


# -- complements -------------------------------------------------------------------------------------------------------

NAMES = ["".join(letters) for length in range(5) for letters in product("ab.é", repeat=length)]


@pytest.fixture(autouse=True)
def steps():
    with bounded():
        yield


def found(pattern, name):
    return re.search(pattern, name, re.ASCII) is not None


def pattern_of(inner):
    return (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map("|".join)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+?", "?", "{2}", "{1,}", "{0,2}"]))
        | inner.map(lambda one: f"({one})")
    )  # fmt: skip


atoms = st.sampled_from(
    ["a", "b", ".", "\\.", "[ab]", "[^a]", "\\w", "\\W", "\\u00e9", "[\\x61-c.]", "(?:^a)", "(?:b$)"]
)


@given(patterns=st.lists(st.recursive(atoms, pattern_of, max_leaves=4), min_size=1, max_size=2))
def test_a_complement_has_the_names_in_which_nothing_is_found(patterns):
    with bounded():
        complement = complement_of(patterns)
    for name in NAMES:
        others = complement is not None and found(complement, name)
        assert others is not any(found(pattern, name) for pattern in patterns)


@pytest.mark.slow
@given(left_out=st.lists(st.sampled_from(NAMES), max_size=5))
def test_other_names_are_all_but_some(left_out):
    others = other_names(left_out)
    assert [name for name in NAMES if not found(others, name)] == [name for name in NAMES if name in left_out]
    assert [name for name in NAMES if any(found(exactly(one), name) for one in left_out)] == [
        name for name in NAMES if name in left_out
    ]


@pytest.mark.parametrize("pattern", [
    "(?=a)", "(?!a)", "(?<=a)b", "\\ba", "(a)\\1", "a{,3}", "a**", "a++", "[]a]", "[[a]", "[a&&b]", "[b-a]", "[\\d-a]",
    "(" * 30 + "a" + ")" * 30,
    "\\p{L}", "(a", "a)", "[a", "\\", "^*", "*a", "a{2,1}b(", "(?P<n>a)", "\\ud800",
])  # fmt: skip
def test_what_is_not_read_is_refused(pattern):
    with pytest.raises(ConfigError, match="cannot be expressed"):
        complement_of([pattern])


@pytest.mark.parametrize("patterns", [
    ["^.{0,500}$"], ["(a|b){4}c.{12}$"], ["a.{30}b.{30}c"], ["(((a{99}){99}){99}){99}"], ["((){9999}){9999}"],
    [exactly("a" * 300)],
])  # fmt: skip
def test_what_would_be_too_long_is_refused(patterns):
    with pytest.raises(ConfigError, match="cannot be expressed"):
        complement_of(patterns)
    with pytest.raises(ConfigError, match="cannot be expressed"):
        other_names(["a" * 300])


@given(patterns=st.lists(st.recursive(atoms, pattern_of, max_leaves=3), min_size=2, max_size=3))
def test_disjoint_patterns_are_not_found_in_the_same_name(patterns):
    together = any(sum(found(pattern, name) for pattern in patterns) > 1 for name in NAMES)
    with bounded():
        assert not (together and disjoint_patterns(patterns))


def test_patterns_are_known_to_be_disjoint():
    assert disjoint_patterns(["^a", "^b", "^[^ab].*c$", "^$"]) and not disjoint_patterns(["^a", "b"])
    assert not disjoint_patterns(["^a", "^(?!a)"])  # it is not read


def test_names_with_control_characters_that_fit_patterns_are_refused():
    with pytest.raises(ConfigError, match="control characters"):
        with_written_names({"properties": {"\n": NULL}, "patternProperties": {"^\\s": True}})


def test_closed_objects_stay_as_they_are():
    schema = {"properties": {"a": NULL}, "patternProperties": {"^b": NULL}, "additionalProperties": False}
    assert with_written_names(schema) == schema and with_written_names({"additionalProperties": NULL}) == {
        "additionalProperties": NULL
    }


def test_a_wrong_complement_shows(monkeypatch):
    monkeypatch.setattr(name_patterns, "_others_of", lambda ranges: ranges)
    assert not found(complement_of(["a"]) or "^$x", "b")
