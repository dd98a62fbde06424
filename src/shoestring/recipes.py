"""Finds recipes, which are run files installed with shoestring or with other packages, without importing the packages.

Another package offers a recipe by an entry point of the group `shoestring.recipes`, whose value is the dotted name of
the folder that holds its `run.toml`:

    [project.entry-points."shoestring.recipes"]
    wildlife = "mypackage.recipes.wildlife"
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

GROUP = "shoestring.recipes"
"""Entry point group of recipes in other packages."""
OURS = "shoestring_recipes"
"""Name of the package that contains shoestring's own recipes."""


class Recipe(NamedTuple):
    """An installed recipe."""

    file: Path
    """Path of the run file; the recipe's code and README are in the same folder."""
    package: str
    """Dotted module name of the recipe's folder."""


def find() -> dict[str, Recipe]:
    """Map names to installed recipes; shoestring's recipes have precedence over packages' recipes of the same name."""
    named = [(entry.name, entry.value.partition(":")[0]) for entry in entry_points(group=GROUP)]
    others = {name: Recipe(path, package) for name, package in named for path in _run_files(package)}
    files = [path for folder in _folders(OURS) for path in folder.glob("*/run.toml")]
    own = {path.parent.name: Recipe(path, f"{OURS}.{path.parent.name}") for path in files}
    return dict(sorted((others | own).items()))


def _run_files(value: str) -> Iterator[Path]:
    """Yield the run file in the folder with a dotted module name, if the file exists."""
    package, *below = value.split(".")
    for folder in _folders(package):
        if (path := folder.joinpath(*below, "run.toml")).is_file():
            yield path


def _folders(package: str) -> list[Path]:
    """Return the folders of an installed top-level package, without importing it."""
    try:
        spec = find_spec(package)
    except (ValueError, ImportError):  # not a valid package name, or no such package
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
