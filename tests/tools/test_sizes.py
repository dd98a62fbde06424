"""The size limits: exact counts, and each limit seen to fail at one line too many."""

import ast
from pathlib import Path

import pytest

from tools import sizes


def plant(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def function(lines: int, name: str = "long") -> str:
    return f"def {name}():\n" + "    x = 1\n" * lines


def faults(root: Path) -> list[str]:
    files = sizes.survey(root)
    return [*sizes.faults(files), *sizes.hints(files)]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    return 1\n", 1),
        ("def f(): return 1\n", 1),
        ('def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n\n    return x\n', 3),
        ('def f():\n    """Only words."""\n', 0),
        ("async def f(\n    a,\n    b,\n):\n    return (\n        a\n    )\n", 3),
        ("def f():\n    @cache\n    def g():\n        return 1\n    return g\n", 4),
    ],
)
def test_body_lines(source, lines):
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert sizes.body_lines(node) == lines


def test_methods_nested_and_conditional_functions_are_found():
    source = "class A:\n def f(self):\n  def g(): pass\nif x:\n def h(): pass\ntry:\n pass\nexcept E:\n def i(): pass\n"
    assert [(it.name, it.line) for it in sorted(sizes.functions(ast.parse(source)))] == [
        ("f", 2), ("g", 3), ("h", 5), ("i", 9),
    ]  # fmt: skip


@pytest.mark.parametrize("folder", ["src/shoestring/comm", "tests", "benchmarks", "tools"])
def test_each_limit_fails_one_line_above_it(tmp_path, folder):
    plant(tmp_path, f"{folder}/a.py", "\n" + function(80))
    plant(tmp_path, f"{folder}/b.py", "#\n" * 400)
    assert faults(tmp_path) == []
    plant(tmp_path, f"{folder}/a.py", "\n" + function(81))
    plant(tmp_path, f"{folder}/b.py", "#\n" * 401)
    assert faults(tmp_path) == [
        f"{folder}/a.py:2: long has a body of 81 lines, at most 80",
        f"{folder}/b.py:401: 401 lines, at most 400 in a file",
    ]


@pytest.mark.parametrize("suffix", ["js", "css", "html"])
def test_pages_of_the_package_have_the_limit_of_files(tmp_path, suffix):
    plant(tmp_path, f"src/shoestring/report/page.{suffix}", "x\n" * 401)
    plant(tmp_path, f"docs/page.{suffix}", "x\n" * 401)
    assert faults(tmp_path) == [f"src/shoestring/report/page.{suffix}:401: 401 lines, at most 400 in a file"]


def test_the_core_has_limits_of_what_there_is_to_learn(tmp_path):
    plant(tmp_path, "src/shoestring/core/functions.py", "".join(function(1, f"f{number}") for number in range(59)))
    plant(tmp_path, "src/shoestring/core/job.py", "class Job:\n" + "".join(f"    a{n}: int = 0\n" for n in range(15)))
    assert faults(tmp_path) == []
    plant(tmp_path, "src/shoestring/core/functions.py", "".join(function(1, f"f{number}") for number in range(60)))
    plant(tmp_path, "src/shoestring/core/job.py", "class Job:\n" + "".join(f"    a{n}: int = 0\n" for n in range(261)))
    assert faults(tmp_path) == [
        "src/shoestring/core:1: 61 public classes and functions, at most 60 in the core",
        "src/shoestring/core:1: 261 public members, at most 260 in the core",
        "src/shoestring/core:1: 261 public members of Job, at most 15 in the core",
    ]


def test_members_are_fields_methods_and_what_init_sets():
    source = """
class A:
    a: int
    b = c = 1
    _private = 2
    def __init__(self): self.d, self.e = 1, 2; self.f: int = 3; self._g = 4; other.h = 5
    def i(self): self.j = 6
    @property
    def k(self): return 1
class _B:
    x: int
def f(): pass
"""
    (node, *_) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert sizes.members(node) == set("abcdefik")
    assert sizes.concepts(ast.parse(source)) == {"A": 8, "f": 0}


def test_a_file_that_does_not_parse_is_named(tmp_path):
    plant(tmp_path, "src/a.py", "x = 1\ndef f(:\n")
    assert faults(tmp_path) == ["src/a.py:2: does not parse"]


def test_the_command_prints_the_sizes_and_hints_and_fails_on_a_fault(tmp_path, capsys):
    plant(tmp_path, "src/shoestring/core/a.py", "".join(function(lines, f"f{lines}") for lines in range(1, 12)))
    assert sizes.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "src: 11 function bodies, median 6, p90 10, max 11 lines (limit 80)",
        "src: 1 files, median 77, p90 77, max 77 lines (limit 400)",
        "core: 11 public classes and functions (limit 60), with 0 public members (limit 260), "
        "0 of them Job's (limit 15)",
    ]
    plant(tmp_path, "tests/b.py", function(81))
    assert sizes.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("hint: tests/b.py:1: long has a body of 81 lines, at most 80\n")
    plant(tmp_path, "tests/c.py", "def f(:\n")
    assert sizes.main([str(tmp_path)]) == 1
    assert "tests/c.py:1: does not parse\n" in capsys.readouterr().out


def test_an_empty_tree_has_no_sizes(tmp_path, capsys):
    assert sizes.main([str(tmp_path)]) == 0
    assert "src: 0 function bodies, none" in capsys.readouterr().out
