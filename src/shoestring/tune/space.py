"""The table [space]: the dimensions of a search, over keys of a run file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoestring.core.errors import ConfigError, nearest

KINDS = ("float", "log", "int", "choice")


@dataclass(frozen=True)
class Dimension:
    """One key that is searched: a range with both ends (`low`, `high`), or `choices`.

    `when` maps other keys of the space to the values under which this one exists.
    """

    key: str
    kind: Literal["float", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The extreme values of a range, or all choices: what to try when the key is checked."""
        return self.choices or ((int(self.low), int(self.high)) if self.kind == "int" else (self.low, self.high))

    def applies(self, values: Mapping[str, Any]) -> bool:
        return all(other in values and values[other] in allowed for other, allowed in self.when.items())


def read_space(table: Mapping[str, Any], source: str) -> tuple[Dimension, ...]:
    """The dimensions of [space], each after those that its conditions name.

    Raises:
        ConfigError: the table is empty, or a dimension is not a range, is empty, or has an impossible condition.
    """
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{source}: [space] has no keys", hint='[space]\n"optim.adamw.lr" = {log = [1e-4, 1e-2]}')
    dimensions = {key: _dimension(key, value, f"{source}: [space] `{key}`") for key, value in _flat(table)}
    for dimension in dimensions.values():
        for other, allowed in dimension.when.items():
            where = f"{source}: [space] `{dimension.key}`: the condition on `{other}`"
            if other not in dimensions:
                raise ConfigError(f"{where} names no key of the space", hint=nearest(other, dimensions))
            missing = [value for value in allowed if value not in dimensions[other].choices]
            if missing:
                raise ConfigError(f"{where} can never hold: {missing[0]!r} is none of its choices")
    return tuple(_ordered(dimensions, source))


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys without quotes are nested tables in TOML: `optim.adamw.lr = {…}`."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        nested = isinstance(value, Mapping) and value and not set(value) & {*KINDS, "when"}
        inside = nested and all(isinstance(each, Mapping) for each in value.values())
        pairs += _flat(value, f"{prefix}{key}.") if inside else [(prefix + key, value)]
    return pairs


def _dimension(key: str, value: object, where: str) -> Dimension:
    if "." not in key:
        raise ConfigError(f"{where} names no table", hint=f"write `run.{key}` for a key of [run]")
    kinds = [kind for kind in KINDS if isinstance(value, Mapping) and kind in value]
    if not isinstance(value, Mapping) or len(kinds) != 1:
        raise ConfigError(f"{where} must be one range or list of choices", hint="log, float, int or choice, as a table")
    unknown = [name for name in value if name not in (kinds[0], "when")]
    if unknown:
        raise ConfigError(f"{where}: unknown key `{unknown[0]}`", hint=nearest(unknown[0], [*KINDS, "when"]))
    conditions = value.get("when", {})
    if not isinstance(conditions, Mapping):
        raise ConfigError(f'{where}: `when` must be a table such as {{"run.model" = "a"}}')
    when = {other: tuple(each) if isinstance(each, list) else (each,) for other, each in conditions.items()}
    (kind,), listed = kinds, value[kinds[0]]
    if kind == "choice":
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f"{where}: `choice` must be a list of at least one value, got {listed!r}")
        if any(not isinstance(each, str | int | float | bool) for each in listed):
            raise ConfigError(f"{where}: choices must be strings, numbers, true or false")
        return Dimension(key, "choice", choices=tuple(listed), when=when)
    low, high = _range(kind, listed, where)
    return Dimension(key, kind, low, high, when=when)


def _range(kind: str, listed: object, where: str) -> tuple[float, float]:
    numbers = (int,) if kind == "int" else (int, float)
    ends = listed if isinstance(listed, list) else []
    if len(ends) != 2 or any(not isinstance(end, numbers) or isinstance(end, bool) for end in ends):
        wanted = "two whole numbers" if kind == "int" else "two numbers"
        raise ConfigError(f"{where}: `{kind}` must be {wanted}, [lowest, highest], got {listed!r}")
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{where}: both ends of the range must be finite, got [{low}, {high}]")
    if not low < high:
        raise ConfigError(f"{where}: the range [{low}, {high}] is empty", hint="write the lower end first")
    if kind == "log" and low <= 0:
        raise ConfigError(
            f"{where}: the logarithm of {low} does not exist", hint="use `float`, or a positive lower end"
        )
    return low, high


def _ordered(dimensions: dict[str, Dimension], source: str) -> list[Dimension]:
    ordered: dict[str, Dimension] = {}
    while len(ordered) < len(dimensions):
        ready = [key for key, each in dimensions.items() if key not in ordered and set(each.when) <= set(ordered)]
        if not ready:
            left = sorted(set(dimensions) - set(ordered))
            raise ConfigError(f"{source}: [space] the conditions of {', '.join(left)} wait for each other")
        ordered |= {key: dimensions[key] for key in ready}
    return list(ordered.values())


def draw(dimensions: tuple[Dimension, ...], suggest: Callable[[Dimension], Any]) -> dict[str, Any]:
    """Values of all dimensions whose conditions hold, from a function that suggests one."""
    values: dict[str, Any] = {}
    for dimension in dimensions:
        if dimension.applies(values):
            values[dimension.key] = suggest(dimension)
    return values
