"""Lists the code that a run file names, without importing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoestring import recipes
from shoestring.naming import USER, Trust, foreign, names_in, task_files

TABLES = ("run", "model", "data")
"""Tables of a run file that do not configure features."""
CODE_KEYS = ("model", "data", "forward", "collate", "loss", "evaluate", "read_file", "predict", "sinks")
"""Keys of [run] that may contain the name of a callable; the key `packages`, with names of packages, is not among
them."""


def code_of(document: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Map keys of [run] and tables of features to the names of code outside shoestring that a run may import from them.

    In the table of a feature, every string that has the form of a callable's name is listed, even if the feature does
    not import it.
    """
    settings = document.get("run")
    settings = settings if isinstance(settings, dict) else {}
    named = {f"run.{key}": foreign(names_in(settings.get(key))) for key in CODE_KEYS}
    named["run.evaluate"] += tuple(task_files(settings.get("evaluate")))
    packages = settings.get("packages")
    listed = packages if isinstance(packages, list | tuple) else ()
    packages = tuple(package for package in listed if isinstance(package, str))
    named["run.packages"] = packages
    for area, tables in document.items():
        if area not in TABLES and isinstance(tables, dict):
            for key, values in tables.items():
                named[f"{area}.{key}"] = packages if area in packages else foreign(names_in(values))
    return {key: names for key, names in named.items() if names}


def trust_of(path: Path, document: Mapping[str, Any]) -> Trust:
    """Return the `Trust` of a run file, which covers the code that the file names and the arguments of this code."""
    if any(path == recipe.file for recipe in recipes.find().values()):  # installing a package implies trusting it
        return USER
    code = code_of(document)
    content = {key: entry(document, key) for key in code}
    if "run.model" in code:
        content["model"] = document.get("model")
    data = document.get("data")
    if "run.data" in code and isinstance(data, dict) and "arguments" in data:
        content["data.arguments"] = data["arguments"]
    names = sorted({name for names in code.values() for name in names})
    settings = document.get("run")
    project = settings.get("project", "") if isinstance(settings, dict) else ""
    text = json.dumps(content, sort_keys=True, default=str)
    return Trust(path, text, tuple(names), project=project if isinstance(project, str) else "")


def entry(document: Mapping[str, Any], name: str) -> Any:
    """Return the value of the key `table.key` in a document."""
    table, _, key = name.partition(".")
    return document[table][key]
