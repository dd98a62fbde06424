"""Imports code by name: callables named `package.module:callable`, and packages of features.

Only this module imports code whose name comes from data, such as a run file. Names that the user wrote or typed are
imported. Names in a folder or file from somebody else are imported only if they are in `OURS`, or if the user trusts
that folder or file: after `shoestring trust`, or because one of the user's own runs wrote it. docs/concepts/security.md
lists all callers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from shoestring import recipes
from shoestring.core.errors import ConfigError, ShoestringError, nearest
from shoestring.storage import trusted
from shoestring.storage.guarded import open_regular

log = logging.getLogger("shoestring")

OURS = frozenset(
    {
        "shoestring.data.images:fashion_mnist",
        "shoestring.models.gpt:gpt124m",
        "shoestring.models.gpt:gpt1b",
        "shoestring.models.gpt:mini",
        "shoestring.models.gpt:small",
        "shoestring.models.gpt:tiny",
        "shoestring.models.images:resnet50",
        "shoestring.models.images:small",
        "shoestring.models.images:smoothed",
        "shoestring.testing.jobs:tiny",
        "shoestring_recipes.images.accuracy:accuracy",
        "shoestring_recipes.images.files:name",
        "shoestring_recipes.images.files:read",
    }
)
"""Callables of shoestring that untrusted data may name, because they only make models, data or numbers from plain
arguments. Callables are listed rather than modules, because a module also contains the functions that it imports."""


HARNESS = "lm-eval:"
"""Prefix of `run.evaluate` for tasks of lm-evaluation-harness: `lm-eval:TASK,TASK`."""


class TrustError(ShoestringError):
    """A folder or file from somebody else names code to run, and the user has not declared that it is trusted."""


@dataclass(frozen=True)
class Trust:
    """Decides whether code that a folder or file (the place) names may be imported.

    Args:
        place: folder or file, from somebody else, that contains the names; None for names that the user gave, which are
            always trusted.
        content: the parts of the place's content that concern code, as JSON types.
        names: callables and packages that the place names, except those in `OURS`.
        granted: whether the user has declared trust by an argument in this program.
        project: folder that is searched last for the code; empty for none.
    """

    place: Path | None = None
    content: Any = None
    names: tuple[str, ...] = ()
    granted: bool = False
    project: str = ""

    @property
    def holds(self) -> bool:
        """Whether the code that the place names may be run."""
        if self.place is None or self.granted or not self.names:
            return True
        with suppress(OSError):  # a source file cannot be read, or is a pipe
            return trusted.is_remembered(self.digest)
        return False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the place's content and of the source files of the named code, which is not imported."""
        digest = hashlib.sha256(json.dumps([self.content, self.names], sort_keys=True, default=str).encode())
        for name in sorted({_package(name) for name in self.names}):
            digest.update(f"\0{name}".encode())
            for path, relative in source_files(name, self.project):
                digest.update(f"\0{relative}\0".encode(errors="surrogateescape"))
                digest.update(_content(path))
        return digest.hexdigest()

    def remember(self) -> None:
        """Record on disk that this user trusts the place; logs a warning if the record cannot be written."""
        if self.place is None or not self.names:
            return
        try:
            trusted.remember(self.digest, self.place)
        except (OSError, ShoestringError) as error:
            log.warning("`%s` will not open without `shoestring trust`: %s", self.place, error)

    def allows(self, *names: str) -> bool:
        """Whether the code with these names may be run; unless `granted`, the place itself must contain all names."""
        return self.place is None or (self.holds and (self.granted or set(names) <= set(self.names)))

    def require(self, *names: str) -> None:
        """Raise TrustError unless the code with these names may be run; without names, all code that the place names.

        Raises:
            TrustError: the user has not declared that the place is trusted, or the place does not contain one of the
                names.
        """
        names = names or self.names
        if self.allows(*names):
            return
        raise TrustError(
            f"`{self.place}` names code to run, `{'`, `'.join(names)}`, and nobody has vouched for it as it is now",
            hint=f"if you know the code and trust who wrote it, run: shoestring trust {self.place}",
        )


USER = Trust()
"""Trust in names that the user typed, wrote in a run file that the user runs, or passed from a program."""


def foreign(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are not in `OURS`, sorted and without duplicates."""
    return tuple(sorted(set(names) - OURS))


def is_name(text: object) -> bool:
    """Whether a value has the form `package.module:callable`; False for `hf:NAME`, which names a model or data set."""
    if not isinstance(text, str) or text.startswith("hf:"):
        return False
    module, _, name = text.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def harness_tasks(text: str) -> list[str] | None:
    """The tasks that `lm-eval:TASK,TASK` names; None for other texts."""
    if not text.startswith(HARNESS):
        return None
    return [name.strip() for name in text.removeprefix(HARNESS).split(",")]


def is_task_file(name: str) -> bool:
    """Whether a task of lm-evaluation-harness is named by its file, which may name code to run."""
    return name.endswith((".yaml", ".yml"))


def task_files(value: object) -> list[str]:
    """The files of tasks in `lm-eval:TASK,TASK`, each with the prefix `lm-eval:`; see `source_files`."""
    tasks = harness_tasks(value) if isinstance(value, str) else None
    return [f"{HARNESS}{name}" for name in tasks or () if is_task_file(name)]


def names_in(value: object) -> Iterator[str]:
    """Yield all strings in a TOML or JSON value, at any depth, that have the form of a callable's name."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)
        elif is_name(value):
            yield str(value)


# -- importing --------------------------------------------------------------------------------------------------------


def resolve(target: str, key: str, trust: Trust = USER) -> Callable[..., Any]:
    """Import the callable whose name is `target`, of the form `package.module:callable`.

    Args:
        key: key of the run file that contains the name, for error messages.
        trust: trust in the place that contains the name; required where names are read from folders and files.

    Raises:
        ConfigError: there is no such module or callable, or importing it fails.
        TrustError: a place from somebody else contains the name, and the user has not declared that it is trusted.
    """
    if not is_name(target):
        raise ConfigError(f"`{key}` is {target!r}, not of the form `package.module:callable`")
    if target not in OURS:
        trust.require(target)
    module_name, _, name = target.partition(":")
    try:
        module = import_module(module_name) if target in OURS else _import(module_name, trust.project)
    except Exception as error:
        reason, hint = f"{type(error).__name__}: {error}", ""
        if isinstance(error, ModuleNotFoundError) and module_name.startswith(f"{recipes.OURS}."):
            hint = f'pip install "shoestring[{module_name.split(".")[1]}]"'
        raise ConfigError(f"`{key}`: cannot import `{module_name}`: {reason}", hint=hint) from error
    value = getattr(module, name, None)
    if not callable(value):
        public = [
            attribute
            for attribute in dir(module)
            if not attribute.startswith("_") and callable(getattr(module, attribute))
        ]
        raise ConfigError(f"`{key}`: `{module_name}` has no callable `{name}`", hint=nearest(name, public))
    return value


def import_package(name: str) -> ModuleType:
    """Import a package of features that `run.packages` names. The caller must have checked that the user trusts the
    package."""
    return _import(name)


def _import(name: str, project: str = "") -> ModuleType:
    """Append the current folder and the project's folder to the import path, and import a module."""
    search(project)
    return import_module(name)


def search(project: str) -> None:
    """Append the current folder and the folder of a project, whose code the user trusts, to the import path."""
    sys.path.extend(_last(project))


def lies_in(name: str, folder: Path) -> bool:
    """Whether a folder holds the top-level module or package of a name; a folder without modules is no package."""
    package = _package(name)
    if name.startswith(HARNESS):
        return False
    return (folder / f"{package}.py").is_file() or any((folder / package).glob("*.py"))


def _last(project: str) -> list[str]:
    """The folders to search last: the current folder and the project's folder, without those already on the import
    path."""
    folders: list[str] = []
    with suppress(FileNotFoundError):  # the current folder was removed
        folders.append(str(Path.cwd()))
    return [folder for folder in dict.fromkeys([*folders, *filter(None, [project])]) if folder not in sys.path]


# -- finding without importing ----------------------------------------------------------------------------------------


def source_files(name: str, project: str = "") -> list[tuple[Path, str]]:
    """List the source files of the top-level module or package of a name, without importing it; for a task file of
    lm-evaluation-harness, list all task files and modules in its folder.

    Args:
        project: folder that is searched last.

    Returns:
        Pairs of path and relative path, sorted; empty for a built-in or missing module.
    """
    if name.startswith(HARNESS):
        folder = Path(name.removeprefix(HARNESS)).parent
        return [(path, path.name) for path in sorted(folder.glob("*")) if path.suffix in (".yaml", ".yml", ".py")]
    spec = _find(_package(name), project if project and lies_in(name, Path(project)) else "")
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [(Path(spec.origin), Path(spec.origin).name)] if spec.has_location and spec.origin else []
    suffixes = (*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
    sources: list[tuple[Path, str]] = []
    for root in spec.submodule_search_locations:
        for folder, below, files in os.walk(root):
            below[:] = [subfolder for subfolder in below if subfolder != "__pycache__"]
            paths = [Path(folder, file) for file in files if file.endswith(suffixes)]
            sources += [(path, str(path.relative_to(root))) for path in paths]
    return sorted(sources, key=lambda pair: pair[1])


def _package(name: str) -> str:
    """Return the top-level module or package of a name, whose code runs first when the name is imported; the name of a
    task file is returned unchanged."""
    if name.startswith(HARNESS):
        return name
    return name.partition(":")[0].partition(".")[0]


def installed(package: str) -> bool:
    """Whether a package can be imported. A folder of that name without modules, such as the folder `wandb` that runs
    leave, is not a package."""
    try:
        spec = find_spec(package)
    except ValueError:  # the package is loaded but has no import specification
        return True
    return spec is not None and spec.origin is not None


def _find(package: str, project: str) -> ModuleSpec | None:
    before = list(sys.path)
    search(project)
    try:
        return find_spec(package)
    except (ValueError, ImportError):  # the module is loaded but has no import specification, such as `__main__`
        return None
    finally:
        sys.path[:] = before


def _content(path: Path) -> bytes:
    """Return a hash of a source file; for a compiled library, which may have gigabytes, its size and time."""
    if path.name.endswith(tuple(EXTENSION_SUFFIXES)):
        status = path.stat()
        return f"{status.st_size} {status.st_mtime_ns}".encode()
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest()
