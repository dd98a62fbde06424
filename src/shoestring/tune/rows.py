"""Defines the database tables of a study's store, and checks their rows, which another program may have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql

from shoestring.core.errors import ConfigError
from shoestring.storage.foreign import parse_json

TABLES = sql.MetaData()
STUDIES = sql.Table(
    "shoestring_studies",
    TABLES,
    sql.Column("name", sql.String(200), primary_key=True),
    sql.Column("version", sql.Integer, nullable=False),
    sql.Column("document", sql.Text, nullable=False),
)
LEASES = sql.Table(
    "shoestring_leases",
    TABLES,
    sql.Column("trial", sql.Integer, primary_key=True, autoincrement=False),  # the trial's id in Optuna's tables
    sql.Column("study", sql.String(200), nullable=False, index=True),
    sql.Column("number", sql.Integer, nullable=False),
    sql.Column("state", sql.String(12), nullable=False),  # ready, held, paused; done, failed, pruned
    sql.Column("owner", sql.String(200), nullable=False, default=""),
    sql.Column("epoch", sql.Integer, nullable=False, default=0),
    sql.Column("expires_at", sql.Float(53), nullable=False, default=0.0),
    sql.Column("place", sql.String(200), nullable=False, default=""),
    sql.Column("parameters", sql.Text, nullable=False),
    sql.Column("step", sql.Integer, nullable=False, default=0),
    sql.Column("rung", sql.Integer, nullable=False, default=0),
    sql.Column("attempts", sql.Integer, nullable=False, default=0),
    sql.Column("seconds", sql.Float(53), nullable=False, default=0.0),
    sql.Column("tokens", sql.Float(53), nullable=False, default=0.0),
    sql.Column("parent", sql.Integer, nullable=False, default=-1),  # number of the trial that was forked, or -1
    # first rung of a fork, which begins from its parent's checkpoint of the previous rung
    sql.Column("forked", sql.Integer, nullable=False, default=0),
    sql.Column("value", sql.Float(53)),
    sql.Column("note", sql.Text, nullable=False, default=""),
    sql.Column("published", sql.Boolean, nullable=False, default=False),
)
REPORTS = sql.Table(
    "shoestring_reports",
    TABLES,
    sql.Column("trial", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("step", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("value", sql.Float(53)),  # NULL means NaN, which SQLite cannot store
)
ENDED = ("done", "failed", "pruned")
STATES = ("ready", "held", "paused", *ENDED)
MOST_RUNGS = 100_000


@dataclass(frozen=True)
class TrialLease:
    """A trial's row, as read from the store. A held lease gives its owner the right to run the trial."""

    trial: int
    number: int
    epoch: int
    owner: str
    state: str
    parameters: Mapping[str, Any] = field(compare=False)
    place: str = ""
    step: int = 0
    rung: int = 0
    attempts: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    parent: int = -1
    forked: int = 0
    value: float | None = None
    note: str = ""
    published: bool = False


def read_object(text: Any, what: str) -> dict[str, Any]:
    """Parse the JSON object in a column.

    Raises:
        ConfigError: the column does not contain a JSON object.
    """
    try:
        value = parse_json(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{what} in the store is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{what} in the store is damaged: it is not a JSON object")
    return value


def read_lease(row: Any) -> TrialLease:
    """Check a row, and convert it to a `TrialLease`.

    Raises:
        ConfigError: a column has a wrong type or an impossible value.
    """
    what = f"trial {row.number!r:.40}"
    values: dict[str, Any] = {}
    for name, (kind, least) in _FIELDS.items():
        value = values[name] = getattr(row, name)
        fits = isinstance(value, kind) and (isinstance(value, bool) == (kind is bool))
        if not fits or (least is not None and not least <= value < 1 << 62):
            raise ConfigError(f"{what} in the store is damaged: `{name}` is {value!r:.40}")
    if values["state"] not in STATES or not values["forked"] <= values["rung"] <= MOST_RUNGS:
        raise ConfigError(f"{what} in the store is damaged: `state` or `rung` is invalid")
    if not (row.value is None or (isinstance(row.value, int | float) and math.isfinite(row.value))):
        raise ConfigError(f"{what} in the store is damaged: `value` is {row.value!r:.40}")
    parameters = read_object(row.parameters, what)
    return TrialLease(parameters=parameters, value=None if row.value is None else float(row.value), **values)


_FIELDS: Mapping[str, tuple[Any, float | None]] = {
    **dict.fromkeys(("trial", "number", "epoch", "step", "rung", "attempts", "forked"), (int, 0)),
    "parent": (int, -1),
    **dict.fromkeys(("seconds", "tokens"), (int | float, 0.0)),
    **dict.fromkeys(("owner", "state", "place", "note"), (str, None)),
    "published": (bool, None),
}
"""Type and minimum value of each column of a lease; None sets no minimum."""


def family(trials: list[TrialLease]) -> list[TrialLease]:
    """Check that trials, ordered by number, are unique and fork only from earlier trials; return the trials.

    Raises:
        ConfigError: a trial appears twice, or its parent is missing.
    """
    before: set[int] = set()
    for trial in trials:
        if trial.number in before or not (trial.parent == -1 or trial.parent in before):
            raise ConfigError(
                f"trial {trial.number} in the store is damaged: it appears twice, or its parent is missing"
            )
        before.add(trial.number)
    return trials


def read_report(step: Any, value: Any, trial: int) -> tuple[int, float]:
    """Check a report, and return its step and value; NULL becomes NaN.

    Raises:
        ConfigError: a column has a wrong type.
    """
    if not isinstance(step, int) or not (value is None or isinstance(value, int | float)):
        raise ConfigError(f"a report of trial {trial} in the store is damaged: step {step!r:.40}, value {value!r:.40}")
    return step, math.nan if value is None else float(value)
