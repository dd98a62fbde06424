"""tune.busy and tune.crowd*: workers that are used, and fifty of them at one database."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured, NotRun, stored
from benchmarks.tune import toy_worker
from benchmarks.tune.postgresql import PostgresServer, programs
from benchmarks.tune.workers import ToySetting, begin, imported
from shoestring.tune.settings import Halving

BUSY, SPREAD = 8, 10.0
CROWD = 50
LIMIT = 900.0
"""Seconds after which a measurement is given up."""


def crowd() -> dict[str, Any]:
    """Fifty workers on trials that only sleep; leases that were lost, and the seconds of all requests."""
    with TemporaryDirectory(prefix="tune-") as folder, PostgresServer() as server:
        setting = ToySetting(server.url, folder, 4 * CROWD, 15.0, 100, 0.2, timed=True)
        setting.worker()
        workers = [begin(setting) for _ in range(CROWD)]
        try:
            for process in workers:
                process.join(LIMIT)
                assert process.exitcode == 0, "a worker did not end"
        finally:
            _kill(workers)
        trials = setting.worker().store.trials()
        requests: dict[str, list[float]] = {}
        for path in Path(folder).glob("requests-*.json"):
            for name, seconds in json.loads(path.read_text()).items():
                requests.setdefault(name, []).extend(seconds)
    lost = sum(trial.epoch - 1 for trial in trials) + sum(trial.state != "done" for trial in trials)
    return {"lost": lost, "requests": requests}


def _kill(workers: list[BaseProcess]) -> None:
    for process in workers:
        process.kill()
        process.join()


# -- workers that are used --------------------------------------------------------------------------------------------


def busy() -> dict[str, Any]:
    """Eight workers under asynchronous halving, until the budget is used up and nothing is left to start.

    A study of minutes: that eight workers begin at once on two cores takes two seconds of it.
    """
    schedule = Halving(first=20, factor=3)
    with TemporaryDirectory(prefix="tune-") as folder:
        url = f"sqlite:///{folder}/store.db"
        setting = ToySetting(url, folder, 240, 60.0, 180, 0.05, schedule=schedule, spread=SPREAD)
        store = setting.worker().store
        imported()
        began = time.monotonic()
        workers = [begin(setting) for _ in range(BUSY)]
        try:
            while len(trials := store.trials()) < setting.trials or any(trial.state == "ready" for trial in trials):
                assert time.monotonic() - began < LIMIT, "the budget was not used up"
                time.sleep(0.2)
            spent = time.monotonic() - began
            steps = {trial.number: _steps(Path(folder), trial.number) for trial in trials}
        finally:
            _kill(workers)
    pauses = {trial.number: toy_worker.pause_of(trial.parameters["toy.x"], setting.pause, SPREAD) for trial in trials}
    used = sum(steps[number] * pauses[number] for number in steps)
    losses = {trial.number: (trial.parameters["toy.x"] - 0.3) ** 2 for trial in trials}
    return {"share": used / (BUSY * spent), "seconds": spent, "synchronous": synchronous(pauses, losses, schedule, 180)}


def _steps(folder: Path, number: int) -> int:
    log = folder / f"trial-{number}" / "steps.log"
    return len(log.read_text().split()) if log.exists() else 0


def synchronous(pauses: dict[int, float], losses: dict[int, float], schedule: Halving, steps: int) -> float:
    """The share of its workers' time that synchronous halving uses, with these trials and without any other cost: at
    each rung all wait for the slowest."""
    left, before, rung, used, spent = sorted(pauses), 0, 0, 0.0, 0.0
    while left and before < steps:
        until = min(schedule.step(rung), steps)
        free = [0.0] * BUSY
        for number in left:
            seconds = (until - before) * pauses[number]
            at = free.index(min(free))
            free[at] += seconds
            used += seconds
        spent += max(free)
        left = sorted(left, key=lambda number: losses[number])[: len(left) // schedule.factor]
        before, rung = until, rung + 1
    return used / (BUSY * spent)


def rows(runs: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars."""

    def of_crowd(value: Callable[[dict[str, Any]], float]) -> Callable[[Deadline], Measured | NotRun]:
        def measured(_: Deadline) -> Measured | NotRun:
            if programs() is None:
                return NotRun("PostgreSQL is not installed")
            found = stored(runs / "crowd.json", check, crowd)
            each = ", ".join(
                f"{name} {1e3 * statistics.median(seconds):.1f} ms of {len(seconds):,}"
                for name, seconds in found["requests"].items()
                if seconds
            )
            return Measured(value(found), f"medians: {each}")

        return measured

    def used(_: Deadline) -> Measured:
        found = stored(runs / "busy.json", check, busy)
        note = f"{found['seconds']:.0f} s; synchronous halving of the same trials, computed: {found['synchronous']:.1%}"
        return Measured(found["share"], note)

    every = lambda found: [each for seconds in found["requests"].values() for each in seconds]  # noqa: E731
    return [
        Bar(
            "tune.busy",
            "share of the time of 8 workers that trials whose lengths differ 10x step, under asynchronous halving",
            ">=",
            0.95,
            used,
            baseline="synchronous halving",
        ),
        Bar(
            "tune.crowd-lost",
            "leases lost, and trials without a result, of 200 trials that only sleep, with 50 workers on PostgreSQL",
            "<=",
            0.0,
            of_crowd(lambda found: float(found["lost"])),
            kind="exact",
        ),
        Bar(
            "tune.crowd-request",
            "seconds of a request to the store, median, with 50 workers on one PostgreSQL",
            "<=",
            0.05,
            of_crowd(lambda found: statistics.median(every(found))),
        ),
    ]
