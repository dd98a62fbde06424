"""`shoestring recipes`: lists the installed recipes, and copies a recipe so that it can be changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from shoestring import recipes
from shoestring.areas import AREAS
from shoestring.core.errors import ConfigError, nearest
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

_TEXTS = (".py", ".toml")
"""Suffixes of files that may name the recipe's package."""


def list_recipes() -> Iterator[str]:
    """Yield two lines for each installed recipe: one with its purpose, one with its areas and its run time.

    The purpose is the first comment of the run file, and the run time its second comment.
    """
    installed = recipes.find()
    width = max(map(len, installed), default=0)
    for name, recipe in installed.items():
        comments = [line[1:].strip() for line in foreign.read_text(recipe.file).splitlines()[:2] if line[:1] == "#"]
        areas = [area for area in AREAS if area in foreign.read_toml(recipe.file)]
        yield f"{name:{width}}  {comments[0] if comments else ''}".rstrip()
        facts = [", ".join(areas), *comments[1:]]
        yield f"{'':{width}}  {'; '.join(filter(None, facts))}".rstrip()


def copy(name: str, folder: Path) -> list[str]:
    """Copy a recipe to a new folder: its run file, its README, and its code as a package that the run file names.

    Returns:
        Lines with the paths of the copied files, and the command that trains the recipe.

    Raises:
        ConfigError: the recipe does not exist, or the folder is not empty or cannot be written.
    """
    installed = recipes.find()
    if name not in installed:
        raise ConfigError(f"there is no recipe `{name}`", hint=nearest(name, installed))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"`{folder}` is not empty", hint="name a new folder")
    # The copy's package gets a name that no installed package has; Python would import that package instead.
    package = re.sub(r"\W", "_", name, flags=re.ASCII)
    package = package if package.isidentifier() else f"recipe_{package}"
    while find_spec(package) is not None:
        package = f"my_{package}"
    recipe, lines = installed[name], []
    for source in sorted(recipe.file.parent.rglob("*")):
        below = source.relative_to(recipe.file.parent)
        if not source.is_file() or "__pycache__" in below.parts:
            continue
        target = folder / below if source.suffix != ".py" else folder / package / below
        content = foreign.read_bytes(source)
        if source.suffix in _TEXTS:
            named = rf"(?<![\w.]){re.escape(recipe.package)}(?!\w)"
            content = re.sub(named, package, content.decode()).encode()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, content)
        except OSError as error:
            raise ConfigError(f"cannot write `{target}`: {error.strerror}", hint="name another folder") from error
        lines.append(str(target))
    return [*lines, f"to train it: shoestring train {folder}"]
