"""Reads a run folder in any state: complete, half-written, still growing, or damaged.

Reading does not fail on files that a crash has damaged: files that cannot be read are listed in `problems`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.report import findings, history_file
from shoestring.report.folder_check import check_run_folder
from shoestring.storage import foreign

Columns = dict[str, dict[int, float]]

# Keys of a summary that describe the run rather than how it ended; they stay valid if the run resumes and then fails.
_STANDING = ("name", "total_steps", "parameters", "features", "baselines")


class _ArrayValues(ValuesView[float]):
    """Iterates over the values of an `ArrayColumn` without looking up each step."""

    def __init__(self, column: ArrayColumn) -> None:
        super().__init__(column)
        self._array = column.array

    def __iter__(self) -> Iterator[float]:
        return iter(self._array.tolist())

    def __reversed__(self) -> Iterator[float]:
        return iter(self._array[::-1].tolist())


class ArrayColumn(Mapping[int, float]):
    """A metric as two arrays of equal length: the steps, ascending and unique, and the values at these steps."""

    def __init__(self, steps: np.ndarray, values: np.ndarray) -> None:
        self.steps, self.array = steps, values

    def __getitem__(self, step: int) -> float:
        place = int(np.searchsorted(self.steps, step))
        if place == len(self.steps) or self.steps[place] != step:
            raise KeyError(step)
        return float(self.array[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps.tolist())

    def __reversed__(self) -> Iterator[int]:
        return reversed(self.steps.tolist())

    def __len__(self) -> int:
        return len(self.steps)

    def values(self) -> _ArrayValues:
        """The values in the order of the steps."""
        return _ArrayValues(self)


Column = dict[int, float] | ArrayColumn


def arrays(column: Mapping[int, float]) -> tuple[Sequence[int] | np.ndarray, np.ndarray]:
    """The steps and the values of a metric. Steps are an array only if all of them are known to fit into 64 bits."""
    if isinstance(column, ArrayColumn):
        return column.steps, column.array
    return list(column), np.fromiter(column.values(), np.float64, len(column))


def values_at(column: Mapping[int, float], steps: Sequence[int]) -> np.ndarray:
    """The values of a metric at some steps; NaN at steps without a value."""
    if not isinstance(column, ArrayColumn) or not len(column):
        return np.array([column.get(step, np.nan) for step in steps], np.float64)
    wanted = np.array(steps, np.int64)
    places = np.minimum(np.searchsorted(column.steps, wanted), len(column) - 1)
    return np.where(column.steps[places] == wanted, column.array[places], np.nan)


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The content of a run folder.

    `columns[key][step]` is the value of a metric. Steps ascend; if a step was written twice, its last value counts.
    """

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    traces: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    """The newest tables and pictures of evaluations; see `findings.read`."""
    problems: list[str] = field(default_factory=list)


def read(folder: Path) -> RunFolder:
    """Read everything of `folder` that can be read.

    Raises:
        ConfigError: `folder` is not a folder, or contains neither run.toml nor metrics.jsonl.
    """

    def rank_of(path: Path) -> tuple[int, str]:
        digits = re.search(r"\d+", path.name)
        return (int(digits[0]) if digits else 0, path.name)

    folder = Path(folder)
    check_run_folder(folder)
    problems: list[str] = []
    events = history_file.read(folder)
    summary = standing(_document(folder / "summary.json", problems), events)
    traces = [_document(path, problems) for path in sorted(folder.glob("trace-*.jsonl"), key=rank_of)]
    return RunFolder(
        path=folder,
        settings=_document(folder / "run.toml", problems),
        environment=_document(folder / "environment.json", problems),
        columns=_columns(folder / "metrics.jsonl", problems),
        summary=summary,
        traces=[trace for trace in traces if trace],
        history=events,
        findings=list(findings.read(folder, problems)),
        problems=problems,
    )


def standing(summary: dict[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of a summary that is still valid: all of it, unless the history shows a start after the last end."""
    if not events or events[-1]["event"] in ("finished", "stopped"):
        return summary
    return {key: summary[key] for key in _STANDING if key in summary}


def number(value: object) -> float | None:
    """`value` as a float if it is a number and not a bool, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of tables under `key`; empty if the value is not such a list."""
    value = document.get(key)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def table(document: dict[str, Any], key: str) -> dict[str, Any]:
    """The table under `key`; empty if the value is not a table."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def flat(document: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text: {"run": {"steps": 4}} becomes {"run.steps": "4"}."""
    result: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return result


def _document(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.suffix == ".jsonl":  # a trace file, whose first line holds the totals
            foreign.check_within(path, path.parent)
            value = foreign.parse_json(next(foreign.read_lines(path), b""))
        elif path.suffix == ".toml":
            value = foreign.read_toml(path, within=path.parent)
        else:
            value = foreign.read_json(path, within=path.parent)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} does not hold a table")
        return {}
    return value


def _columns(path: Path, problems: list[str]) -> Columns:
    if not path.is_file():
        return {}
    columns: Columns = {}
    skipped = 0
    try:
        foreign.check_within(path, path.parent)
        for line in foreign.read_lines(path):
            skipped += not add_row(columns, line)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read: {error}")
    if skipped:
        problems.append(f"metrics.jsonl: {skipped} unreadable line{'s' * (skipped > 1)} left out")
    # A resumed run may write steps again, so steps may be out of order; sorting takes linear time if they are in order.
    return {key: dict(sorted(column.items())) for key, column in sorted(columns.items())}


def add_row(columns: Columns, line: bytes) -> bool:
    """Add the values of a line of metrics.jsonl to `columns`; returns False if the line is not a row of metrics."""
    if not line.strip():
        return True
    try:
        row = foreign.parse_json(line.decode("utf-8", "replace"))
        step = int(row.pop("step"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False
    for key, value in row.items():
        figure = value if type(value) is float else number(value)
        if figure is not None:
            columns.setdefault(key, {})[step] = figure
    return True
