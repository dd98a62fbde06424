"""Reads the table [space], which defines the dimensions of a search over keys of a run file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoestring.core.errors import ConfigError, nearest

KINDS = ("float", "log", "int", "choice")


def position(choices: Sequence[Any], value: object) -> int | None:
    """Index of a choice that equals the value; a choice of the same type has precedence (1 and 1.0 are equal)."""
    written = [spelled(choice) for choice in choices]
    if (text := spelled(value)) in written:
        return written.index(text)
    return next((at for at, choice in enumerate(choices) if type(choice) is not bool and choice == value), None)


def spelled(value: object) -> str:
    """Format a choice as text; 1, 1.0 and true have different texts."""
    return json.dumps(value, default=repr)


@dataclass(frozen=True)
class Dimension:
    """A key of the run file to search over: a range that includes its ends `low` and `high`, or a list of `choices`.

    `when` maps other keys of the space to the values for which this key applies.
    """

    key: str
    kind: Literal["float", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values to validate for this key: both ends of a range, or all choices."""
        return self.choices or ((int(self.low), int(self.high)) if self.kind == "int" else (self.low, self.high))

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether the dimension's conditions hold for these values."""
        return all(
            other in values and spelled(values[other]) in map(spelled, allowed) for other, allowed in self.when.items()
        )

    def index(self, value: object) -> int:
        """Index of a value among the choices.

        Raises:
            ValueError: the value is not among the choices.
        """
        if (index := position(self.choices, value)) is None:
            raise ValueError(f"`{self.key}` has no choice {value!r:.80}")
        return index

    def holds(self, value: object) -> bool:
        """Whether a value fits this dimension: it is one of the choices, or finite (and above 0 on a log scale)."""
        if self.kind == "choice":
            return position(self.choices, value) is not None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value) and (self.kind != "log" or value > 0)


def read_space(table: Mapping[str, Any], source: str) -> tuple[Dimension, ...]:
    """Read the dimensions of [space]; a dimension comes after the dimensions that its conditions name.

    Raises:
        ConfigError: the table is empty; or a dimension is neither a range nor a list of choices, is empty, or has an
            impossible condition.
    """
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{source}: [space] has no keys", hint='[space]\n"optim.adamw.lr" = {log = [1e-4, 1e-2]}')
    dimensions = {key: _dimension(key, value, f"{source}: [space] `{key}`") for key, value in _flat(table)}
    for dimension in list(dimensions.values()):
        when: dict[str, tuple[Any, ...]] = {}
        for other, allowed in dimension.when.items():
            where = f"{source}: [space] `{dimension.key}`: the condition on `{other}`"
            if other not in dimensions:
                raise ConfigError(f"{where} names no key of the space", hint=nearest(other, dimensions))
            missing = [value for value in allowed if position(dimensions[other].choices, value) is None]
            if missing:
                raise ConfigError(f"{where} can never hold: {missing[0]!r} is not one of its choices")
            when[other] = tuple(dimensions[other].choices[dimensions[other].index(value)] for value in allowed)
        dimensions[dimension.key] = replace(dimension, when=when)
    # A dimension comes after the dimensions that its conditions name.
    ordered: dict[str, Dimension] = {}
    while len(ordered) < len(dimensions):
        ready = [
            key for key, dimension in dimensions.items() if key not in ordered and set(dimension.when) <= set(ordered)
        ]
        if not ready:
            left = sorted(set(dimensions) - set(ordered))
            raise ConfigError(f"{source}: [space] the conditions of {', '.join(left)} depend on each other")
        ordered |= {key: dimensions[key] for key in ready}
    return tuple(ordered.values())


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested tables to dotted keys; TOML reads the unquoted key `optim.adamw.lr` as nested tables."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        is_table = isinstance(value, Mapping) and value and not set(value) & {*KINDS, "when"}
        holds_tables = is_table and all(isinstance(inner, Mapping) for inner in value.values())
        pairs += _flat(value, f"{prefix}{key}.") if holds_tables else [(prefix + key, value)]
    return pairs


def _dimension(key: str, value: object, where: str) -> Dimension:
    if "." not in key:
        raise ConfigError(f"{where} names no table", hint=f"write `run.{key}` for a key of [run]")
    kinds = [kind for kind in KINDS if isinstance(value, Mapping) and kind in value]
    if not isinstance(value, Mapping) or len(kinds) != 1:
        raise ConfigError(
            f"{where} must be one range or list of choices", hint="write a table with the key log, float, int or choice"
        )
    unknown = [name for name in value if name not in (kinds[0], "when")]
    if unknown:
        raise ConfigError(f"{where}: unknown key `{unknown[0]}`", hint=nearest(unknown[0], [*KINDS, "when"]))
    conditions = value.get("when", {})
    if not isinstance(conditions, Mapping):
        raise ConfigError(f'{where}: `when` must be a table such as {{"run.model" = "a"}}')
    when = {other: tuple(allowed) if isinstance(allowed, list) else (allowed,) for other, allowed in conditions.items()}
    (kind,), listed = kinds, value[kinds[0]]
    if kind == "choice":
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f"{where}: `choice` must be a list of at least one value, got {listed!r}")
        items = listed
        for _ in range(4):  # lists may be nested up to this depth
            items = [inner for item in items for inner in (item if isinstance(item, list) else [item])]
        if not all(isinstance(item, str | int | float | bool) for item in items):
            raise ConfigError(f"{where}: choices must be strings, numbers, true or false, or lists of them")
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


def draw(dimensions: tuple[Dimension, ...], suggest: Callable[[Dimension], Any]) -> dict[str, Any]:
    """Call `suggest` for each dimension whose conditions hold, and return the values by key."""
    values: dict[str, Any] = {}
    for dimension in dimensions:
        if dimension.applies(values):
            values[dimension.key] = suggest(dimension)
    return values
