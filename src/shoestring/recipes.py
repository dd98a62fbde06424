"""Finds recipes: run files that are installed with shoestring or with other packages, without importing any.

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
"""Group of the entry points."""
OURS = "shoestring_recipes"
"""Package with shoestring's own recipes."""


class Recipe(NamedTuple):
    """A recipe that is installed."""

    file: Path
    """The run file; the recipe's code and README lie beside it."""
    package: str
    """Dotted name of the folder."""


def find() -> dict[str, Recipe]:
    """Map names to the installed recipes; a name of shoestring's own cannot be taken by another."""
    named = [(entry.name, entry.value.partition(":")[0]) for entry in entry_points(group=GROUP)]
    others = {name: Recipe(path, package) for name, package in named for path in _run_files(package)}
    files = [path for folder in _folders(OURS) for path in folder.glob("*/run.toml")]
    own = {path.parent.name: Recipe(path, f"{OURS}.{path.parent.name}") for path in files}
    return dict(sorted((others | own).items()))


def _run_files(value: str) -> Iterator[Path]:
    """The run file in the folder that a dotted name means."""
    package, *below = value.split(".")
    for folder in _folders(package):
        if (path := folder.joinpath(*below, "run.toml")).is_file():
            yield path


def _folders(package: str) -> list[Path]:
    """The folders of an installed top-level package."""
    try:
        spec = find_spec(package)
    except (ValueError, ImportError):  # no name of a package, or one that cannot be found
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
