"""What an area's benchmark module imports, and the command line that each of them has."""

from __future__ import annotations

import argparse
import gc
import json
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from benchmarks.machine import Environment, git_commit
from benchmarks.rows import (
    RESULTS,
    Bar,
    Measured,
    NotRun,
    Row,
    declare,
    hold,
    not_run,
    read,
    record,
    unique,
)
from benchmarks.timing import Paired, commands_cpu_time, paired, paired_commands, run_command
from shoestring.core.errors import ConfigError, ShoestringError, nearest
from shoestring.storage.whole import write_atomic

__all__ = [
    "Bar",
    "Deadline",
    "Environment",
    "Measured",
    "NotRun",
    "OutOfBudget",
    "Paired",
    "Row",
    "commands_cpu_time",
    "hold",
    "main",
    "measure",
    "not_run",
    "paired",
    "paired_commands",
    "parser",
    "report",
    "resumable",
    "run_command",
    "selected",
    "shared",
    "stored",
]

T = TypeVar("T")


class OutOfBudget(BaseException):  # the name is the reason
    """The time for the benchmarks is used up. Nothing that handles an `Exception`, as compilers do, may take it."""


class Deadline:
    """When the measurements must have ended."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, negative when past; infinite where no budget was set."""
        return self._end - time.monotonic()

    def within(self, seconds: float) -> Deadline:
        """The sooner one of this and the one in so many seconds."""
        return Deadline(min(seconds, self.left()))

    def check(self) -> None:
        """Raises: OutOfBudget, when none are left."""
        if self.left() <= 0:
            raise OutOfBudget

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Interrupt the block with OutOfBudget at the deadline (between two of its Python instructions)."""
        self.check()
        if not math.isfinite(self.left()) or threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGALRM, _out_of_budget)
        signal.setitimer(signal.ITIMER_REAL, max(self.left(), 1e-6))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)


def _out_of_budget(number: int, frame: FrameType | None) -> None:
    raise OutOfBudget


def stored(path: Path, check: Callable[[], None], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a run gave, as one JSON file with its commit; made now if it was not before, and if there is time left."""
    if not path.exists():
        check()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"commit": git_commit(), **make()}).encode() + b"\n")
    return json.loads(path.read_text())


def measure(bar: Bar, environment: Environment, deadline: Deadline) -> tuple[Row, bool]:
    """Measure one bar: its row, and whether the measurement went without an error (which is printed)."""
    if bar.gpu and environment.gpu is None:
        return not_run(bar, "no GPU", environment), True
    try:
        with deadline.enforced():
            found = bar.measure(deadline)
        if isinstance(found, NotRun):
            return not_run(bar, found.reason, environment), True
        if not isinstance(found, Measured):
            found = Measured(found)
        return hold(bar, found.value, environment, note=found.note), True
    except OutOfBudget:
        return not_run(bar, "budget", environment), True
    except Exception as error:
        traceback.print_exc()
        return not_run(bar, f"failed: {type(error).__name__}: {error}", environment), False


def line(row: Row) -> str:
    """One line for a terminal; the state stands in words."""
    state = row.status.upper() if row.status == "missed" else row.status
    measured = "-" if row.measured is None else f"{row.measured:.5g}"
    note = f" ({row.reason})" if row.reason else ""
    return f"{state:8}{row.id}  {measured} {row.op} {row.bar:g}  {row.what}{note}"


def report(
    bars: Sequence[Bar],
    environment: Environment,
    deadline: Deadline,
    results: Path,
    *,
    strict: bool,
    each: float = math.inf,
) -> int:
    """Measure `bars` one after the other, print a line and store a row for each.

    Args:
        each: seconds that one bar may take at most.

    Returns:
        1 when a measurement failed with an error or, where `strict`, when a bar was missed; else 0.
    """
    fine, area = True, ""
    for bar in bars:
        if bar.gpu and environment.gpu:
            make_room(forget=area not in ("", bar.area))
            area = bar.area
        row, well = measure(bar, environment, deadline.within(each))
        path = results / f"{bar.area}.json"
        record(path, row)
        kept = read(path)[row.id]
        earlier = f"; kept: {kept.measured:.5g} at {kept.commit}" if kept.measured != row.measured else ""
        print(line(row) + earlier, flush=True)
        fine = fine and well and not (strict and row.status == "missed")
    return 0 if fine else 1


_shared: list[Callable[[], None]] = []


def shared(make: Callable[[], T]) -> Callable[[], T]:
    """As `functools.cache`, of what bars of one area share: it is forgotten before those of another are measured."""
    kept = cache(make)
    _shared.append(kept.cache_clear)
    return kept


def make_room(*, forget: bool) -> None:
    """Free memory of the device that earlier bars took: what some of them measure is all that the device has in use.

    Args:
        forget: what bars share, and compiled code, too.
    """
    import torch

    if forget:
        for clear in _shared:
            clear()
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def selected(bars: Sequence[Bar], prefixes: Sequence[str] = (), skipped: Sequence[str] = ()) -> list[Bar]:
    """In the order of the prefixes, the bar whose id each is, or else those whose ids start with it; all without any.

    Args:
        skipped: prefixes of those that are left out.

    Raises:
        ConfigError: a prefix has none.
    """
    left_out = [bar for prefix in skipped for bar in _of(prefix, bars)]
    chosen = [bar for prefix in prefixes for bar in _of(prefix, bars)] if prefixes else bars
    return [bar for bar in dict.fromkeys(chosen) if bar not in left_out]


def _of(prefix: str, bars: Sequence[Bar]) -> list[Bar]:
    chosen = [bar for bar in bars if bar.id == prefix] or [bar for bar in bars if bar.id.startswith(prefix)]
    if not chosen:
        raise ConfigError(f"no bar's id starts with `{prefix}`", hint=nearest(prefix, [bar.id for bar in bars]))
    return chosen


def parser(name: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    flags = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=f"Measure the bars of {name}.")
    flags.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "PREFIX"}
    said = "the bar of this id, or those whose id starts with this"
    flags.add_argument("--only", **several, help=f"measure {said}; given several times, in this order")
    flags.add_argument("--skip", **several, help=f"leave out {said}; may be given several times")
    flags.add_argument("--list", action="store_true", help="print the bars and measure nothing")
    flags.add_argument("--commit", default="", help="the commit to record, for a copy without git's history")
    return flags


def resumable(area: str, runs: Path | None = None) -> argparse.ArgumentParser:
    """The flags of areas whose long measurements go on where they stopped: minutes to measure, and what was stored.

    Args:
        runs: folder of what is stored, by default the area's own among the results.
    """
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--budget", type=float, default=math.inf)
    flags.add_argument("--runs", type=Path, default=runs or RESULTS / "runs" / area)
    return flags


def main(
    area: str, rows: Callable[[], Sequence[Bar]], argv: Sequence[str] | None = None, results: Path = RESULTS
) -> int:
    """The command line of one area's module; see the package's docstring.

    Args:
        area: the module's name, which its bars' ids start with.
        rows: gives every bar of the area, those that need a GPU included.
        argv: arguments, the process's own by default.
        results: folder of the results files.

    Returns:
        The exit status: 1 for a missed bar with `--strict` or a failed measurement, 2 for wrong usage.
    """
    flags = parser(area).parse_args(argv)
    try:
        bars = unique(rows(), area)
        chosen = selected(bars, flags.only, flags.skip)
        if flags.list:
            print("\n".join(f"{bar.id}  {bar.op} {bar.bar:g}  {bar.what}" for bar in chosen))
            return 0
        _all_declared(results / f"{area}.json", bars)
        environment = Environment.capture(commit=flags.commit)
        declare(results / f"{area}.json", bars, environment)
        return report(chosen, environment, Deadline(), results, strict=flags.strict)
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _all_declared(path: Path, bars: Sequence[Bar]) -> None:
    unknown = sorted(read(path).keys() - {bar.id for bar in bars})
    if unknown:
        raise ConfigError(f"{path} holds `{unknown[0]}`, which is not declared", hint="declare it, or delete its row")
