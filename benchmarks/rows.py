"""Bars, rows and the files that hold them.

A `Bar` is what an area promises, declared before anything runs. A `Row` is what became of it: the record that is
committed in `benchmarks/results/<area>.json` and that `docs/evidence.md` shows.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from numbers import Real
from pathlib import Path
from typing import Literal

from benchmarks.machine import Environment
from shoestring.core.errors import ConfigError, DataError

Op = Literal[">=", "<=", ">"]
_HOLDS: Mapping[Op, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, ">": operator.gt}
Status = Literal["held", "missed", "open", "not-run"]
Kind = Literal["exact", "drawn", "timed"]
Interval = tuple[float, float]

RESULTS = Path(__file__).parent / "results"
_ID = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9][a-z0-9_-]*)+")
_TREE = re.compile(r"[0-9a-f]{7,40}(-dirty)?|unknown")
_SOURCES = re.compile(r"[0-9a-f]{12}|unknown")


@dataclass(frozen=True)
class Measured:
    """A measured value, in the unit that the bar's `what` names, with its 95% interval and a note on it."""

    value: float
    note: str = ""
    interval: Interval | None = None
    """None for a bar that is exact, and where nobody knows: such a bar is never held."""


@dataclass(frozen=True)
class NotRun:
    """A measurement that could not be made here, and why."""

    reason: str


@dataclass(frozen=True)
class Bar:
    """What an area promises: `what` is `op` `bar`, measured by `measure`.

    The id is `<area>.<name>`, is a link target in the documentation, and never changes; another quantity takes
    another id. `peers` names the installed distributions whose versions matter to the result.

    `kind` says what differs between two measurements. An `exact` figure is the same each time (bytes, counts,
    equality). A `drawn` one depends on random numbers, and a `timed` one on the machine as well, which must be calm.
    The last two hold only if all of their 95% interval does.
    """

    id: str
    what: str
    op: Op
    bar: float
    measure: Callable[..., float | Measured | NotRun]  # called with a Deadline
    baseline: str = ""
    seeds: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    gpu: bool = False
    kind: Kind = "timed"
    command: str = ""  # of the record, where it is not the benchmark's own

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ConfigError(f"bar id `{self.id}` is malformed", hint="write <area>.<name>, in lower case")
        if self.op not in _HOLDS:
            raise ConfigError(f"bar `{self.id}`: op is `{self.op}`", hint=f"use one of {', '.join(_HOLDS)}")
        if not _is_number(self.bar):
            raise ConfigError(f"bar `{self.id}`: {self.bar!r} is no finite number")

    @property
    def area(self) -> str:
        """The part of the id before the first dot: the module and the results file."""
        return self.id.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One bar's record. `reason` says why it was not run, or adds a note to what was measured."""

    id: str
    what: str
    op: Op
    bar: float
    kind: Kind
    measured: float | None
    interval: Sequence[float] | None
    status: Status
    reason: str
    baseline: str
    command: str
    rests_on: Sequence[Mapping[str, str]]
    """The code of the measurement and of each stored run that it used: git's tree and the set of source files
    (provenance.py)."""
    seconds: float | None
    """Time that the measurement took, stored runs aside."""
    hardware: str
    versions: Mapping[str, str]
    seeds: Sequence[int]
    date: str


def status(op: Op, bar: float, measured: float | None, kind: Kind, interval: Sequence[float] | None) -> Status:
    """Whether a bar is held: by the figure if it is exact, else by all of its interval.

    "open" is between: the bar lies within the interval, or the figure would hold but no interval is known.
    """
    if measured is None:
        return "not-run"
    ends = (measured, measured) if kind == "exact" or interval is None else interval
    within = [_HOLDS[op](end, bar) for end in ends]
    if not any(within):
        return "missed"
    return "held" if all(within) and (kind == "exact" or interval is not None) else "open"


def hold(
    bar: Bar,
    measured: Measured,
    environment: Environment,
    *,
    rests_on: Sequence[Mapping[str, str]] = (),
    seconds: float | None = None,
) -> Row:
    """The row of a bar that was measured.

    Raises:
        ConfigError: the figure is not a finite number, or lies outside of its own interval.
    """
    value, interval = measured.value, measured.interval
    if not _is_number(value):
        raise ConfigError(f"bar `{bar.id}` measured {value!r}, no finite number", hint="return NotRun(reason)")
    if interval is not None and not _is_interval(interval, float(value)):
        raise ConfigError(f"bar `{bar.id}` measured {value!r}, outside of its interval {interval!r}")
    ends = None if interval is None else [float(interval[0]), float(interval[1])]
    return _row(
        bar, environment, measured=float(value), interval=ends, reason=measured.note, rests_on=rests_on, seconds=seconds
    )


def not_run(bar: Bar, reason: str, environment: Environment) -> Row:
    """The row of a bar that was not measured, which always says why."""
    return _row(bar, environment, measured=None, interval=None, reason=reason or "no reason given")


def _row(
    bar: Bar,
    environment: Environment,
    *,
    measured: float | None,
    interval: list[float] | None,
    reason: str,
    rests_on: Sequence[Mapping[str, str]] = (),
    seconds: float | None = None,
) -> Row:
    return Row(
        id=bar.id,
        what=bar.what,
        op=bar.op,
        bar=bar.bar,
        kind=bar.kind,
        measured=measured,
        interval=interval,
        status=status(bar.op, bar.bar, measured, bar.kind, interval),
        reason=reason,
        baseline=bar.baseline,
        command=bar.command or f"python -m benchmarks.{'gpu' if bar.gpu else bar.area} --only {bar.id}",
        rests_on=[dict(source) for source in rests_on],
        seconds=None if seconds is None else round(seconds, 1),
        hardware=environment.hardware,
        versions=environment.versions(*bar.peers),
        seeds=list(bar.seeds),
        date=datetime.now(UTC).date().isoformat(),
    )


def read(path: Path) -> dict[str, Row]:
    """The rows of one results file by id; empty where there is no file.

    Raises:
        DataError: the file is no list of rows, or a row is malformed, contradicts itself, stands twice or belongs
            to another area.
    """
    if not path.exists():
        return {}
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(records, list):
        raise DataError(f"{path}: not a list of rows")
    rows: dict[str, Row] = {}
    for number, record in enumerate(records):
        row = _parse(record, f"{path}: row {number}")
        if row.id.partition(".")[0] != path.stem:
            raise DataError(f"{path}: row {number}: `{row.id}` belongs to another area")
        if row.id in rows:
            raise DataError(f"{path}: row {number}: `{row.id}` stands there twice")
        rows[row.id] = row
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace `path` at once by `rows`, sorted by id."""
    records = [asdict(row) for row in sorted(rows, key=lambda row: row.id)]
    text = json.dumps(records, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def declare(path: Path, bars: Iterable[Bar], environment: Environment) -> None:
    """Give every bar a row in `path`: its stored one, held against the bar as it stands now, or a not-run one."""
    rows = read(path)
    for bar in bars:
        old = rows.get(bar.id)
        rows[bar.id] = _held_against(bar, old) if old else not_run(bar, "not measured yet", environment)
    write(path, rows.values())


def record(path: Path, row: Row) -> None:
    """Put one row into `path`; a not-run row never takes the place of a measured one."""
    rows = read(path)
    old = rows.get(row.id)
    settled = old is not None and row.measured is None and (old.measured is not None or old.reason == row.reason)
    if not settled:
        write(path, (rows | {row.id: row}).values())


def unique(bars: Iterable[Bar], area: str) -> list[Bar]:
    """The bars by id.

    Raises:
        ConfigError: two have one id, or one belongs to another area.
    """
    found: dict[str, Bar] = {}
    for bar in bars:
        if bar.area != area:
            raise ConfigError(f"bar `{bar.id}` is declared by `{area}`", hint=f"name it {area}.<name>")
        if bar.id in found:
            raise ConfigError(f"bar `{bar.id}` is declared twice", hint="each bar has an id of its own")
        found[bar.id] = bar
    return [found[id_] for id_ in sorted(found)]


def _held_against(bar: Bar, row: Row) -> Row:
    verdict = status(bar.op, bar.bar, row.measured, bar.kind, row.interval)
    return replace(row, what=bar.what, op=bar.op, bar=bar.bar, kind=bar.kind, status=verdict)


def _parse(record: object, where: str) -> Row:
    if not isinstance(record, dict) or record.keys() != _VALID.keys():
        raise DataError(f"{where}: not a row", hint=f"its keys are {', '.join(_VALID)}")
    for key, valid in _VALID.items():
        if not valid(record[key]):
            raise DataError(f"{where}: `{key}` is {record[key]!r}")
    row = Row(**record)
    if (verdict := status(row.op, row.bar, row.measured, row.kind, row.interval)) != row.status:
        raise DataError(f"{where}: `{row.id}` says {row.status}, but is {verdict}: {row.measured} {row.op} {row.bar}")
    if row.interval is not None and (row.measured is None or not _is_interval(row.interval, row.measured)):
        raise DataError(f"{where}: `{row.id}` measured {row.measured}, outside of its interval {row.interval}")
    if row.measured is None and not row.reason:
        raise DataError(f"{where}: `{row.id}` was not run, and no reason is given")
    return row


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_interval(value: Sequence[float], figure: float) -> bool:
    """Whether a figure lies within an interval, whose ends may be equal."""
    return len(value) == 2 and all(map(_is_number, value)) and value[0] <= figure <= value[1]


def _is_origin(value: object) -> bool:
    """Whether it names a tree and a set of source files."""
    if not isinstance(value, dict) or value.keys() != {"tree", "sources"} or not all(map(_is_text, value.values())):
        return False
    return bool(_TREE.fullmatch(value["tree"])) and bool(_SOURCES.fullmatch(value["sources"]))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_date(value: object) -> bool:
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_VALID: Mapping[str, Callable[[object], bool]] = {
    "id": lambda value: isinstance(value, str) and bool(_ID.fullmatch(value)),
    "what": _is_text,
    "op": lambda value: value in _HOLDS,
    "bar": _is_number,
    "kind": lambda value: value in ("exact", "drawn", "timed"),
    "measured": lambda value: value is None or _is_number(value),
    "interval": lambda value: value is None or isinstance(value, list),
    "status": lambda value: value in ("held", "missed", "open", "not-run"),
    "reason": _is_text,
    "baseline": _is_text,
    "command": _is_text,
    "rests_on": lambda value: isinstance(value, list) and all(map(_is_origin, value)),
    "seconds": lambda value: value is None or _is_number(value),
    "hardware": _is_text,
    "versions": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "seeds": lambda value: isinstance(value, list) and all(map(_is_integer, value)),
    "date": _is_date,
}
