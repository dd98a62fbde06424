"""Tables become settings, or an error that says where, what was expected and what is near."""

from dataclasses import dataclass
from typing import Literal

import pytest

from shoestring import run
from shoestring.core.errors import ConfigError
from shoestring.settings import describe, help_texts, structure


@dataclass(frozen=True, kw_only=True)
class ExampleTable:
    """Settings of every type that a run file has."""

    steps: int = 1
    """How many."""
    rate: float = 0.5
    """How fast,
    over two lines."""
    name: str = ""
    on: bool = False
    shape: Literal["cosine", "constant"] = "cosine"
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[str, ...] = ()
    either: bool | str = False


def test_values_of_the_right_types():
    table = {"steps": 3, "rate": 2, "name": "x", "on": True, "pair": [1, 2.5], "many": ["a", "b"], "either": "auto"}
    made = structure(table, ExampleTable, "area.table", "run.toml")
    assert made == ExampleTable(steps=3, rate=2.0, name="x", on=True, pair=(1.0, 2.5), many=("a", "b"), either="auto")
    assert type(made.rate) is float and type(made.pair[0]) is float
    assert structure({}, ExampleTable, "t", "f") == ExampleTable()


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ({"stepz": 1}, "run.toml: unknown key `stepz` in [area.table]", "did you mean `steps`?"),
        ({"zzzz": 1}, "unknown key `zzzz`", "valid: either, many, name, on, pair, rate, shape, steps"),
        ({"steps": "3"}, "`area.table.steps` must be a whole number, got '3'", ""),
        ({"steps": 1.0}, "`area.table.steps` must be a whole number, got 1.0", ""),
        ({"steps": True}, "`area.table.steps` must be a whole number, got True", ""),
        ({"rate": "fast"}, "`area.table.rate` must be a number, got 'fast'", ""),
        ({"rate": False}, "`area.table.rate` must be a number, got False", ""),
        ({"name": 3}, "`area.table.name` must be a string, got 3", ""),
        ({"on": 1}, "`area.table.on` must be true or false, got 1", ""),
        ({"on": "yes"}, "`area.table.on` must be true or false, got 'yes'", ""),
        ({"shape": "cosin"}, "`area.table.shape` cannot be 'cosin'", "did you mean `cosine`?"),
        ({"shape": 3}, '`area.table.shape` must be one of "cosine", "constant", got 3', ""),
        ({"pair": [1.0]}, "`area.table.pair` must be a list of 2 numbers, got [1.0]", ""),
        ({"pair": 1.0}, "`area.table.pair` must be a list of 2 numbers, got 1.0", ""),
        ({"many": ["a", 1]}, "`area.table.many` must be a list of strings, got ['a', 1]", ""),
        ({"many": "abc"}, "`area.table.many` must be a list of strings, got 'abc'", ""),
        ({"either": 3}, "`area.table.either` must be true or false or a string, got 3", ""),
        ({"name": {"a": 1}}, "`area.table.name` must be a string, got {'a': 1}", ""),
        ([1], "`area.table` must be a table, got [1]", "write [area.table]"),
    ],
)
def test_each_message(table, message, hint):
    with pytest.raises(ConfigError) as caught:
        structure(table, ExampleTable, "area.table", "run.toml")
    assert message in str(caught.value)
    assert caught.value.hint == hint
    assert "\n" not in str(caught.value)


def test_types_in_words():
    assert describe(tuple[float, float]) == "a list of 2 numbers"
    assert describe(tuple[Literal["a", "b"], ...]) == 'a list, each one of "a", "b"'
    assert describe(bool | str) == "true or false or a string"


def test_help_is_the_string_under_a_field():
    assert help_texts(ExampleTable) == {"steps": "How many.", "rate": "How fast, over two lines."}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("run.toml", "run"),
        ("./run.toml", "run"),
        ("../run.toml", "run"),
        ("other.toml", "other"),
        ("first/run.toml", "first"),
        ("first", "first"),
        ("quickstart", "quickstart"),
    ],
)
def test_a_run_is_named_alike_in_every_folder(tmp_path, monkeypatch, source, name):
    for folder in (tmp_path, tmp_path / "here", tmp_path / "here" / "first"):
        folder.mkdir(exist_ok=True)
        for file in ("run.toml", "other.toml"):
            (folder / file).write_text("")
    monkeypatch.chdir(tmp_path / "here")
    assert run.load(source).name == name
