"""Variables whose names say nothing are counted, wherever they are bound."""

import ast
from pathlib import Path

import pytest

from tools import variables


@pytest.mark.parametrize(
    "statement",
    [
        "each = 1",
        "each: int = 1",
        "first, (each, *rest) = x",
        "for each in x: ...",
        "y = [1 for each in x]",
        "with x as each: ...",
        "if each := x: ...",
        "def f(each): ...",
        "def f(*, each=1): ...",
        "def f(*each): ...",
        "lambda each: 1",
        "match x:\n case [each]: ...",
        "match x:\n case [*each]: ...",
        "match x:\n case {**each}: ...",
        "match x:\n case int() as each: ...",
    ],
)
def test_each_way_to_bind_a_name(statement):
    assert [name for _, name in variables.variables(ast.parse(statement))] == ["each"]


@pytest.mark.parametrize("statement", ["x = each", "job.kept = 1", "f(given=1)", "each.x = 1", "'said'", "reached = 1"])
def test_reading_and_attributes_bind_none(statement):
    assert list(variables.variables(ast.parse(statement))) == []


def test_more_than_allowed_fail_and_fewer_are_a_hint(tmp_path: Path, capsys):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("\nfound = kept = 1\n")
    assert variables.main([str(tmp_path)], allowed=1) == 1
    assert "src/a.py:2: `found` is no name for a variable" in capsys.readouterr().out
    assert variables.main([str(tmp_path)], allowed=2) == 0
    assert "src/a.py" not in capsys.readouterr().out
    assert variables.main([str(tmp_path)], allowed=3) == 0
    assert "lower ALLOWED in tools/variables.py to 2" in capsys.readouterr().out
