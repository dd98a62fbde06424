"""Check that all ranks train the same run: compare their settings, code and versions before anything else is done."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import shoestring
from shoestring.core.world import World
from shoestring.run_code import code_of

_SOURCES = (".py", ".c", ".cpp", ".h", ".toml")


def check_ranks(document: Mapping[str, Any], world: World) -> None:
    """Check that all ranks were started with the same settings and the same code. A collective.

    Args:
        document: content of the run file, as `Run.document` returns it.

    Raises:
        ConfigError: a setting or the code differs between ranks. The error is raised on all ranks, and names the key,
            the values and the ranks.
    """
    if world.size == 1:
        return
    # Hosts may have the project in different folders; its code is compared below.
    settings = {key: value for key, value in document["run"].items() if key != "project"}
    facts: dict[str, Any] = {
        **document,
        "run": settings,
        "version of Python": ".".join(map(str, sys.version_info[:2])),
        "version of torch": torch.__version__,
        "version of shoestring": _version(),
        "code of shoestring": _digest(Path(shoestring.__file__).parent),
    }
    for name in sorted({name for names in code_of(document).values() for name in names}):
        module = name.partition(":")[0]
        facts[f"code of {module}"] = _digest_of_module(module)
    world.alike(facts, "start all ranks with the same run file, the same flags and the same code")


@cache
def _version() -> str:
    try:
        return version("shoestring")
    except PackageNotFoundError:
        return "not installed"


@cache
def _digest(folder: Path) -> str:
    """Hash the names and contents of the source files in a folder."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest_of_module(module: str) -> str:
    """Hash the code of a module: its file, or all files of its package, because the module may import them.

    For an installed package the result is its version. If there is no such module, the result is empty, and the error
    is raised later when the module is imported.
    """
    package = module.partition(".")[0]
    with suppress(Exception):  # a custom import finder may raise any error
        spec = find_spec(package)
        if spec is not None and spec.origin is not None and "site-packages" in Path(spec.origin).parts:
            return version(package)
        if spec is not None and spec.submodule_search_locations:
            return "-".join(_digest(Path(folder)) for folder in spec.submodule_search_locations)
        if spec is not None and spec.origin is not None:
            return hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=6).hexdigest()
    return ""
