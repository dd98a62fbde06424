"""tune.kills*: workers killed and stalled at random moments, over a store that goes away."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, Measured, NotRun, stored
from benchmarks.tune import toy_worker
from benchmarks.tune.postgresql import PostgresServer, programs
from benchmarks.tune.toy_trial import undisturbed
from benchmarks.tune.workers import ToySetting, begin

BATCHES, TRIALS, KILLS, STALLS, OUTAGES = 10, 20, 100, 10, 2
WORKERS, LEASE, STEPS, PAUSE = 4, 3.0, 1000, 0.02


@dataclass
class Disturber:
    """Kills and stalls workers, and starts others in their place."""

    begin: Callable[[], BaseProcess]
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    stopped: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workers: list[BaseProcess] = [self.begin() for _ in range(WORKERS)]

    def act(self, kills: int, stalls: int) -> None:
        """One kill or stall, or the end of a stall."""
        index = self.chance.randrange(WORKERS)
        worker = self.workers[index]
        if index in self.stopped:
            if time.monotonic() - self.stopped[index] > 2 * LEASE:
                self._signal(worker, signal.SIGCONT)
                del self.stopped[index]
        elif not worker.is_alive():
            self.done["crash"] += worker.exitcode != 0
            self.workers[index] = self.begin()
        elif self.done["stall"] < stalls and self.chance.random() < stalls / (kills + stalls):
            self._signal(worker, signal.SIGSTOP)
            self.stopped[index] = time.monotonic()
            self.done["stall"] += 1
        elif self.done["kill"] < kills:
            worker.kill()
            worker.join()
            self.workers[index] = self.begin()
            self.done["kill"] += 1

    def end(self, seconds: float = 600.0) -> None:
        """Wait until the workers have ended, and kill those that have not."""
        for worker in self.workers:
            self._signal(worker, signal.SIGCONT)
        for worker in self.workers:
            worker.join(seconds)
            worker.kill()
            worker.join()

    @staticmethod
    def _signal(worker: BaseProcess, number: int) -> None:
        if worker.is_alive() and worker.pid is not None:
            os.kill(worker.pid, number)


def batch(number: int) -> dict[str, Any]:
    """One study of 20 trials under 100 kills, 10 stalls past the lease and 2 outages; what became of it."""
    chance = random.Random(number)
    with TemporaryDirectory(prefix="tune-") as folder, PostgresServer() as server:
        setting = ToySetting(server.url, folder, TRIALS, LEASE, STEPS, PAUSE)
        setting.worker()
        disturber, outages = disturbed(lambda: begin(setting), server, chance)
        worker = setting.worker()
        worker.run()  # what no worker was left to finish
        return _outcome(worker, Path(folder), disturber.done["kill"], disturber.done["stall"], outages)


def disturbed(start: Callable[[], BaseProcess], server: PostgresServer, chance: random.Random) -> tuple[Disturber, int]:
    """What was done to the workers of a batch, all of which have ended, and the number of outages of their store."""
    disturber = Disturber(start, chance)
    try:
        outages = _disturb(disturber, server, chance)
        disturber.end()
    finally:
        disturber.end(0.0)
    return disturber, outages


def _disturb(disturber: Disturber, server: PostgresServer, chance: random.Random) -> int:
    """All kills, stalls and outages of a batch; the number of outages."""
    outages, began = 0, time.monotonic()
    down = sorted(chance.uniform(10.0, 60.0) for _ in range(OUTAGES))
    while disturber.done["kill"] < KILLS or disturber.done["stall"] < STALLS or outages < OUTAGES:
        if outages < OUTAGES and time.monotonic() - began > down[outages]:
            server.stop()
            time.sleep(chance.uniform(5.0, 60.0))
            server.start()
            outages += 1
        time.sleep(chance.uniform(0.2, 2.2))
        disturber.act(KILLS, STALLS)
    return outages


def _outcome(worker: Any, folder: Path, kills: int, stalls: int, outages: int) -> dict[str, Any]:
    trials = worker.store.trials()
    wrong = [
        f"trial {trial.number}: {trial.state} {trial.value}"
        for trial in trials
        if trial.state != "done" or trial.value != undisturbed(trial.parameters["toy.x"], STEPS)
    ]
    worker.proposer.publish()
    shown = Counter(trial.state.name for trial in worker.proposer.study.get_trials())
    if len(trials) != TRIALS or shown["COMPLETE"] != TRIALS or shown["RUNNING"]:
        wrong.append(f"{len(trials)} trials; Optuna shows {dict(shown)}")
    computed = sum(len((folder / f"trial-{trial.number}" / "steps.log").read_text().split()) for trial in trials)
    epochs = sum(trial.epoch for trial in trials)
    repeated = computed - TRIALS * STEPS
    return {"wrong": wrong, "repeated": repeated, "starts": epochs, "kills": kills, "stalls": stalls,
            "outages": outages}  # fmt: skip


def rows(runs: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars."""

    def all_batches(value: Callable[[list[dict[str, Any]]], float]) -> Measured | NotRun:
        if programs() is None:
            return NotRun("PostgreSQL is not installed")
        found = [
            stored(runs / f"kills-{number}.json", check, lambda number=number: batch(number))
            for number in range(BATCHES)
        ]
        counts = ", ".join(f"{sum(each[name] for each in found):,} {name}" for name in ("kills", "stalls", "outages"))
        starts, wrong = sum(each["starts"] for each in found), [line for each in found for line in each["wrong"]]
        note = f"{counts} in {BATCHES} studies of {TRIALS} trials on {WORKERS} workers, PostgreSQL; {starts:,} leases"
        return Measured(value(found), "; ".join([note, *wrong[:3]]))

    def repeated(found: list[dict[str, Any]]) -> float:
        """A lease that is lost costs what was computed since the last checkpoint, whatever took it."""
        lost = sum(each["starts"] for each in found) - BATCHES * TRIALS
        return sum(each["repeated"] for each in found) / max(lost, 1) / toy_worker.EVERY

    said = "1,000 kills, 100 stalls past the lease and 20 outages of 5 to 60 s of the store, over 200 trials"
    return [
        Bar(
            "tune.kills-results",
            f"trials without exactly one result, or with another than an undisturbed trial's, bit by bit; {said}",
            "<=",
            0.0,
            measure=lambda _: all_batches(lambda found: float(sum(len(each["wrong"]) for each in found))),
            kind="exact",
        ),
        Bar(
            "tune.kills-repeated",
            f"save intervals that are repeated for each lease that ended early; {said}",
            "<=",
            1.0,
            measure=lambda _: all_batches(repeated),
            kind="drawn",
        ),
    ]


if __name__ == "__main__":
    print(batch(int(sys.argv[1])))
