"""Finds the areas that a feature's code imports, by reading its source and by importing it in a fresh interpreter."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shoestring.areas import AREAS
from shoestring.core.feature import Feature, area_of


def areas_named(kind: type[Feature]) -> Iterator[tuple[str, str]]:
    """Yield ("file:line", area) for every import of an area that is not the feature's own."""
    own, file = area_of(kind), Path(inspect.getfile(kind))
    inside = kind.__module__.startswith("shoestring.")
    for path in sorted(file.parent.rglob("*.py")) if inside else [file]:
        for line, name in _imported(ast.parse(path.read_text()), f"shoestring.{own}" if inside else ""):
            parts = name.split(".")
            if parts[0] == "shoestring" and len(parts) > 1 and parts[1] in AREAS and parts[1] != own:
                yield f"{path.name}:{line}", parts[1]


def _imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for every import in a module, and for every expression `shoestring.name`."""
    aliases = {"shoestring"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                aliases |= {alias.asname for alias in names if alias.name == "shoestring" and alias.asname}
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join(package.split(".")[: 2 - level + 1]) if level else ""
                start = ".".join(part for part in (base, module) if part)
                yield from ((node.lineno, f"{start}.{alias.name}") for alias in names)
            case ast.Constant(value=str(text)) if text.startswith("shoestring."):
                yield node.lineno, text  # a string that may be passed to importlib
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in aliases:
                yield node.lineno, f"shoestring.{attribute}"


def loaded_with(kind: type[Feature]) -> frozenset[str]:
    """Return the names of the modules that are loaded after a fresh interpreter has imported the feature's settings."""
    return _loaded(kind.__module__, tuple(path for path in sys.path if path))


@cache
def _loaded(module: str, path: tuple[str, ...]) -> frozenset[str]:
    code = "import sys, importlib; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", code, module], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise AssertionError(f"`import {module}` fails in a fresh interpreter:\n{done.stderr}")
    return frozenset(done.stdout.split())
