"""Reads a run folder in any state: complete, half-written, still growing, or damaged.

Reading never fails on what a crash can leave behind: what cannot be read is listed in `problems`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.report import history_file

Columns = dict[str, dict[int, float]]

# What a summary says of the run, not of how it ended: it still holds if the run was resumed and then failed.
_STANDING = ("name", "total_steps", "parameters", "features", "baselines")


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The content of a run folder; `columns[key][step]` is a metric's value, steps ascending, last write of each."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    columns: Columns = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    traces: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(folder: Path) -> RunFolder:
    """Read everything of `folder` that can be read.

    Raises:
        ConfigError: `folder` is no folder, or holds neither run.toml nor metrics.jsonl.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"no run folder at {folder}", hint="give the folder that `shoestring train` wrote")
    if not any((folder / name).is_file() for name in ("run.toml", "metrics.jsonl")):
        raise ConfigError(f"{folder} is not a run folder: it has no run.toml and no metrics.jsonl")
    problems: list[str] = []
    events = history_file.read(folder)
    summary = _document(folder / "summary.json", problems)
    if events and events[-1]["event"] not in ("finished", "stopped"):
        summary = {key: summary[key] for key in _STANDING if key in summary}
    traces = [_document(path, problems) for path in sorted(folder.glob("trace-*.jsonl"), key=_rank_of)]
    return RunFolder(
        path=folder,
        settings=_document(folder / "run.toml", problems),
        environment=_document(folder / "environment.json", problems),
        columns=_columns(folder / "metrics.jsonl", problems),
        summary=summary,
        traces=[trace for trace in traces if trace],
        history=events,
        problems=problems,
    )


def number(value: object) -> float | None:
    """`value` as a float when it is a number (truth values are not), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of tables under `key`; empty when it is anything else."""
    value = document.get(key)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def table(document: dict[str, Any], key: str) -> dict[str, Any]:
    """The table under `key`; empty when it is anything else."""
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


def _rank_of(path: Path) -> tuple[int, str]:
    digits = re.search(r"\d+", path.name)
    return (int(digits[0]) if digits else 0, path.name)


def _document(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text("utf-8", errors="replace")
        if path.suffix == ".jsonl":  # a trace: its head has the totals
            text = text.partition("\n")[0]
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
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
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            skipped += not _add(columns, line)
    if skipped:
        problems.append(f"metrics.jsonl: {skipped} unreadable line{'s' * (skipped > 1)} left out")
    return {key: _ordered(column) for key, column in sorted(columns.items())}


def _ordered(column: dict[int, float]) -> dict[int, float]:
    steps = list(column)
    return column if steps == sorted(steps) else dict(sorted(column.items()))


def _add(columns: Columns, line: str) -> bool:
    """Put one line's values into `columns`; False when the line is not a row of metrics."""
    if not line.strip():
        return True
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False
    for key, value in row.items():
        figure = value if type(value) is float else number(value)
        if figure is not None:
            columns.setdefault(key, {})[step] = figure
    return True
