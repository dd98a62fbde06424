"""`shoestring keys`: lists and searches the keys of run files, with their types, defaults and help texts.

Importing this module does not import torch, so the command line shows the keys of a recipe within a few tenths of a
second.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

import tomli_w

from shoestring import other_names, renames, run
from shoestring.core.errors import ConfigError, nearest
from shoestring.data import Data
from shoestring.run_code import TABLES
from shoestring.settings import describe, help_texts

NARROWEST, WIDEST = 60, 110
"""Minimum and maximum width, in characters, at which help texts are wrapped."""


@dataclass(frozen=True)
class RunKey:
    """One key of a run file."""

    table: str
    name: str
    type: str
    """Type of the values, in words such as `a whole number`."""
    default: str
    """Default value in TOML; empty if the key has no default, `{}` if it is a table."""
    help: str

    @property
    def flag(self) -> str:
        """The command-line flag that sets the key."""
        return f"--{self.name}" if self.table == "run" else f"--{self.table}.{self.name}"


def tables(packages: Sequence[str] = ()) -> dict[str, type]:
    """Name of a table of run files -> class of its settings.

    Args:
        packages: names of the user's own packages, whose features are included.
    """
    return {"run": run.Settings, "data": Data, **run.keys(), **run.keys(packages)}


def nested(table: str, settings: type) -> dict[str, type]:
    """Name of a table inside `table` -> class of its settings."""
    own = {field.name for field in fields(settings)}
    return {
        f"{table}.{name}": kind
        for name, kind in get_type_hints(settings).items()
        if name in own and isinstance(kind, type) and is_dataclass(kind)
    }


def keys_of(table: str, settings: type) -> list[RunKey]:
    """The keys of a table, without the keys of tables inside it."""
    texts, hints = help_texts(settings), get_type_hints(settings)
    return [
        RunKey(
            table,
            field.name,
            describe(hints[field.name]),
            toml_of(field.default if field.default_factory is MISSING else field.default_factory()),
            texts.get(field.name, ""),
        )
        for field in fields(settings)
    ]


def toml_of(value: object) -> str:
    """Write a value in TOML, as it stands in a run file; empty if the value is missing."""
    if value is MISSING:
        return ""
    if is_dataclass(value) or value == {}:
        return "{}"
    if isinstance(value, Mapping):  # an inline table, on one line
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        if any(isinstance(item, Mapping) for item in value):
            return f"[{', '.join(map(toml_of, value))}]"
        return json.dumps(list(value), ensure_ascii=False)
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def all_keys(packages: Sequence[str] = ()) -> list[RunKey]:
    """All keys of run files, table by table; the keys of an inner table follow the keys of its outer table."""
    keys = []
    for table, settings in tables(packages).items():
        for name, kind in {table: settings, **nested(table, settings)}.items():
            keys += [key for key in keys_of(name, kind) if key.default != "{}"]
    return keys


def search(words: Sequence[str], packages: Sequence[str] = ()) -> list[RunKey]:
    """Find the keys whose name or help text contains every word; the best matches come first.

    The order of matches is: keys whose name equals a word, keys whose name contains the words, keys whose help text
    contains the words. Among equal matches, keys of tables that every run has come first. A single word may also be the
    name of a setting in another tool; then the result is the equivalent key.

    Raises:
        ConfigError: no key matches.
    """
    wanted = [renames.new_name(word.removeprefix("--").replace("-", "_")).lower() for word in words]

    def rank(key: RunKey) -> int | None:
        path = f"{key.table}.{key.name}".lower()
        if not all(word in f"{path} {key.help.lower()}" for word in wanted):
            return None
        if all(word in (path, key.name.lower(), key.table) or path.endswith(f".{word}") for word in wanted):
            return 0
        return 1 if all(word in path for word in wanted) else 2

    keys = all_keys(packages)
    if len(wanted) == 1 and (here := other_names.NAMES.get(wanted[0])):
        return [key for name in here for key in keys if name in (key.flag[2:], key.table)]
    ranked = [(place, key) for key in keys if (place := rank(key)) is not None]
    if not ranked:
        hint = nearest(wanted[0], {key.name for key in keys}) if len(wanted) == 1 else "try a single word"
        raise ConfigError(f"no key matches `{' '.join(words)}`", hint=hint if "did you" in hint else "try fewer words")
    usual = {"run", "data", *(f"{area}.{technique}" for area, technique in run.DEFAULTS.items())}
    return [key for _, key in sorted(ranked, key=lambda pair: (pair[0], pair[1].table not in usual))]


def keys_of_run(source: str, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Describe the keys of all tables in a run file or a recipe, table by table, with the values that are set there or
    by the overrides.

    Raises:
        ConfigError: the file or recipe does not exist, or names a table that does not exist.
    """
    _, document = run.read(source)
    run.override(document, overrides, source)
    kinds = tables()
    named = [
        table
        for area, content in document.items()
        for table in ([area] if area in TABLES else [f"{area}.{technique}" for technique in content])
    ]
    setters = f"{source} or this command line" if overrides else source
    yield f"Keys of {source}. A value after = is what {setters} sets; one in parentheses is the default."
    for table in dict.fromkeys(("run", "data", *named)):
        if table not in kinds:
            continue  # the table belongs to a user's package, or holds the arguments of a model
        values = _values(document, table)
        yield ""
        yield f"[{table}] {(kinds[table].__doc__ or '').strip().splitlines()[0]}"
        for name, kind in {table: kinds[table], **nested(table, kinds[table])}.items():
            inside = values if name == table else _values(document, name)
            for key in keys_of(name, kind):
                if key.default != "{}":
                    yield from lines_of(key, inside.get(key.name, MISSING))
    yield ""
    yield "Other techniques are turned on by naming a key of theirs: shoestring keys WORD"


def _values(document: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    """The content of a table in a document; empty if the document has no such table."""
    content: Any = document
    for word in table.split("."):
        content = content.get(word, {}) if isinstance(content, Mapping) else {}
    return content if isinstance(content, Mapping) else {}


def lines_of(key: RunKey, value: object = MISSING) -> Iterator[str]:
    """Lines for the terminal that describe a key: its flag with the value or the default, then its help text."""
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    if value is MISSING:
        assigned = f"({key.default})" if key.default else "(must be given)"
    elif value == "" and key.default != '""':
        assigned = "(must be given)"
    else:
        assigned = f"= {toml_of(value)}"
    yield f"  {key.flag} {assigned}"
    text = f"{key.help} Takes {key.type}." if key.type.startswith("one of") else key.help
    yield from textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")
