"""docs/concepts/security.md lists every place of the package where a name becomes code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import shoestring

SOURCE = Path(shoestring.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "concepts" / "security.md"
CALLS = {
    "resolve",
    "import_package",
    "import_module",
    "build_model",
    "open_model",
    "load_model",
    "run_module",
    "run_path",
}
CALLS |= {"exec", "eval", "__import__", "exec_module", "load_module", "get_class_from_dynamic_module", "CDLL", "PyDLL"}
PLACE = re.compile(r"`([\w/]+\.py):(\w+)`")


def calls(tree, function="<module>"):
    """(function, call) of each call that can make code of a name; a name that is written there is no such call."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call):
            called = node.func
            bare = isinstance(called, ast.Name) and called.id in CALLS
            of_module = (
                isinstance(called, ast.Attribute)
                and called.attr in CALLS - {"resolve", "eval", "exec"}
                and not (called.attr == "load_model" and ast.unparse(called.value) == "safetensors.torch")
            )
            written = bool(node.args) and isinstance(node.args[0], ast.Constant)
            if (bare or of_module) and not written:
                yield inside, called
        yield from calls(node, inside)


@cache
def found():
    places, called = set(), re.compile(rf"\b({'|'.join(CALLS)})\(")
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        if relative.parts[0] != "testing" and called.search(text := path.read_text()):  # that runs scenarios of tests
            places |= {f"{relative}:{function}" for function, _ in calls(ast.parse(text))}
    return places


@pytest.mark.slow
def test_each_place_is_listed_and_each_that_is_listed_is_there():
    section = PAGE.read_text().partition("## Where a name becomes code")[2].partition("\n## ")[0]
    listed = {f"{file}:{function}" for file, function in PLACE.findall(section)}
    assert found() - listed == set(), "say in docs/concepts/security.md who gives the word for it"
    assert listed - found() == set()


def test_a_new_call_is_found(tmp_path):
    text = "def start(name):\n    from importlib import import_module\n    return import_module(name)\n"
    assert [function for function, _ in calls(ast.parse(text))] == ["start"]
    assert not list(calls(ast.parse("import_module('json')\npath.resolve()\nmodel.eval()\n")))


def test_import_is_called_by_one_module_for_names_in_data():
    """`resolve` and `import_package` of naming.py; what others import is named by our own source."""
    importing = {place for place in found() if "import_module" in (SOURCE / place.partition(":")[0]).read_text()}
    assert {place.partition(":")[0] for place in importing} <= {
        "__init__.py", "commands/table.py", "confined.py", "forking.py", "models/gguf_weights.py", "models/hf.py",
        "naming.py", "run.py", "tune/process.py",
    }  # fmt: skip
