"""What an area's benchmark module imports, and the command line that each of them has."""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from benchmarks.calm import PATIENCE, BusyMachineError, Watch, watched
from benchmarks.machine import ROOT, Environment, git_tree
from benchmarks.provenance import UNKNOWN, Sources, measured_files
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
    """What a run gave, as one JSON file that names its code; made now if it was not before, and if there is time."""
    if not path.exists():
        check()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**origin(), **make()}).encode() + b"\n")
    return used(json.loads(path.read_text()))


@dataclass
class _Measurement:
    """What the bar being measured rests on."""

    sources: str
    runs: list[dict[str, str]] = field(default_factory=list)


_current = _Measurement(UNKNOWN)


def origin() -> dict[str, str]:
    """The code that runs now, as stored runs and rows name it; outside of a bar's measurement its files are unknown."""
    return {"tree": git_tree(), "sources": _current.sources}


def used(run: T) -> T:
    """Note that the bar being measured rests on a stored run, and return the run."""
    named = run if isinstance(run, dict) else {}
    _current.runs.append({key: str(named.get(key, UNKNOWN)) for key in ("tree", "sources")})
    return run


def measure(bar: Bar, environment: Environment, deadline: Deadline, sources: Sources | None = None) -> tuple[Row, bool]:
    """Measure one bar: its row, and whether the measurement went without an error (which is printed).

    Args:
        sources: where the files that the bar measures are put down.
    """
    global _current
    if bar.gpu and environment.gpu is None:
        return not_run(bar, "no GPU", environment), True
    _current = _Measurement(UNKNOWN if sources is None else sources.add(measured_files(_module(bar), bar.area)))
    try:
        began = time.monotonic()
        with deadline.enforced():
            figure = _timed(bar, deadline) if bar.kind == "timed" and not bar.gpu else _plain(bar, deadline)
        if isinstance(figure, NotRun):
            return not_run(bar, figure.reason, environment), True
        rests_on = [{"tree": environment.tree, "sources": _current.sources}, *_current.runs]
        distinct = list({json.dumps(one): one for one in rests_on}.values())
        return hold(bar, figure, environment, rests_on=distinct, seconds=time.monotonic() - began), True
    except OutOfBudget:
        return not_run(bar, "budget", environment), True
    except BusyMachineError as error:
        return not_run(bar, f"the machine was busy: {error}", environment), True
    except Exception as error:
        traceback.print_exc()
        reason = f"failed: {type(error).__name__}: {error}".replace(f"{ROOT}/", "")  # no path of this machine
        return not_run(bar, reason, environment), False


def _plain(bar: Bar, deadline: Deadline) -> Measured | NotRun:
    figure = bar.measure(deadline)
    return figure if isinstance(figure, Measured | NotRun) else Measured(figure)


def _timed(bar: Bar, deadline: Deadline) -> Measured | NotRun:
    """Measure on a calm machine, and say how calm it was."""
    with watched(Watch(patience=min(PATIENCE, deadline.left()))) as watch:
        figure = _plain(bar, deadline)
    if isinstance(figure, NotRun):
        return figure
    return replace(figure, note="; ".join(filter(None, (figure.note, str(watch)))))


def _module(bar: Bar) -> str:
    """Name of the module that measures a bar."""
    work: Any = bar.measure
    while (inner := getattr(work, "__wrapped__", getattr(work, "func", None))) is not None:  # of wraps, of partial
        work = inner
    name = getattr(work, "__module__", None) or type(work).__module__
    started = sys.modules["__main__"].__spec__
    return started.name if name == "__main__" and started else name


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
    fine, area, sources = True, "", Sources.read(results)
    for bar in bars:
        if bar.gpu and environment.gpu:
            make_room(forget=area not in ("", bar.area))
            area = bar.area
        row, well = measure(bar, environment, deadline.within(each), sources)
        path = results / f"{bar.area}.json"
        record(path, row)
        sources.write(results, named_sources(results))
        kept = read(path)[row.id]
        earlier = f"; kept: {kept.measured:.5g} of {kept.date}" if kept.measured != row.measured else ""
        print(line(row) + earlier, flush=True)
        fine = fine and well and not (strict and row.status == "missed")
    return 0 if fine else 1


def named_sources(results: Path) -> set[str]:
    """The source sets that rows and stored runs name."""
    rows = {one["sources"] for path in results.glob("*.json") for row in read(path).values() for one in row.rests_on}
    runs = (path.read_text() for path in (results / "runs").rglob("*.json"))
    return rows | {digest for text in runs for digest in _NAMED.findall(text)}


_NAMED = re.compile(r'"sources": "([0-9a-f]{12})"')
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
    flags.add_argument(
        "--judge", action="store_true", help="hold stored rows against the bars as they are, measure nothing"
    )
    flags.add_argument("--tree", default="", help="git's tree to record, for a copy without its history")
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
        environment = Environment.capture(tree=flags.tree)
        declare(results / f"{area}.json", bars, environment)
        if flags.judge:
            return 0
        return report(chosen, environment, Deadline(), results, strict=flags.strict)
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _all_declared(path: Path, bars: Sequence[Bar]) -> None:
    unknown = sorted(read(path).keys() - {bar.id for bar in bars})
    if unknown:
        raise ConfigError(f"{path} holds `{unknown[0]}`, which is not declared", hint="declare it, or delete its row")
