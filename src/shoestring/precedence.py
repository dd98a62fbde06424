"""Decides which of two conflicting keys of a run file takes effect, and when using both is an error.

A key on the command line overrules keys of the run file. Two keys that both stand in the file, or both on the command
line, are an error if one of them would have no effect, because the user expects an effect from both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.errors import ConfigError


@dataclass(frozen=True)
class Overruling:
    """A rule: if one key takes effect, other keys of the same table have no effect.

    Args:
        key: full name of the key: `table.key`, or `area.technique.key`.
        others: names, without the table, of the keys that have no effect if `key` takes effect.
        counts: function (value of `key`) -> whether `key` takes effect with this value.
        yields: whether passing one of `others` on the command line removes `key` of the run file; if false, using both
            is an error.
        listed: whether a run file with `key` may also contain `others` at their default values, as a resolved run file
            does.
        in_file: whether a run file with `key` may also contain `others` with any values.
    """

    key: str
    others: tuple[str, ...]
    counts: Callable[[Any], bool] = bool
    yields: bool = False
    listed: bool = True
    in_file: bool = False

    @property
    def table(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


LENGTHS = ("steps", "minutes", "epochs")
"""Keys of [run] that set the length of training; `minutes` and `epochs` have no effect if they are 0."""
OVERRULING = (
    Overruling("run.minutes", ("steps",), yields=True, listed=False),
    Overruling("run.epochs", ("steps",), yields=True, listed=False),
    Overruling("run.minutes", ("epochs",), yields=True),
    Overruling("run.epochs", ("minutes",), yields=True),
    Overruling("data.tokenizer", ("vocabulary",), lambda value: value != "bpe", in_file=True),
    Overruling("optim.schedule.function", ("shape", "warmup", "cooldown", "final")),
    Overruling("memory.lora.adapter", ("rank", "alpha", "dora", "layers", "modules_to_train", "seed"), in_file=True),
    Overruling("profile.callpaths.max_overhead", ("sample_rate",), yields=True),
)
Defaults = Callable[[str], Mapping[str, Any]]
"""Function from the name of a run file's table to the defaults of its keys."""


def settle(document: dict[str, Any], flags: Collection[str]) -> None:
    """Remove the keys of the run file that keys on the command line overrule.

    Args:
        document: the parsed run file, with the values from the command line already written into it.
        flags: full names of the keys on the command line.

    Raises:
        ConfigError: a key on the command line would have no effect.
    """
    for rule in OVERRULING:
        table = _table(document, rule.table)
        others = [name for name in rule.others if name in table]
        if rule.key in flags:
            for name in others:
                if f"{rule.table}.{name}" not in flags and rule.counts(table[rule.name]):
                    del table[name]
        elif rule.yields and any(f"{rule.table}.{name}" in flags and table[name] for name in others):
            table.pop(rule.name, None)
        if rule.in_file and rule.name in table and rule.counts(table[rule.name]):
            for name in others:
                if f"{rule.table}.{name}" in flags:
                    raise _without_effect(rule, name, "the command line")


def check(document: Mapping[str, Any], defaults: Defaults, source: str) -> None:
    """Raise ConfigError if a document contains two keys of which one has no effect."""
    for rule in OVERRULING:
        table = _table(document, rule.table)
        if rule.in_file or rule.name not in table or not rule.counts(table[rule.name]):
            continue
        usual = defaults(rule.table)
        for name in rule.others:
            listed = rule.listed or {*LENGTHS} <= table.keys()  # run files of earlier versions contain all lengths
            if name in table and not (listed and table[name] == usual[name]):
                raise _without_effect(rule, name, source)


def _without_effect(rule: Overruling, name: str, where: str) -> ConfigError:
    message = f"{where}: `{rule.key}` leaves `{rule.table}.{name}` without effect"
    return ConfigError(message, hint="remove one of the two; the command line overrules the file")


def _table(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    table: Any = document
    for part in name.split("."):
        table = table.get(part, {}) if isinstance(table, Mapping) else {}
    return table if isinstance(table, dict) else {}
