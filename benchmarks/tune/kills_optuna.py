"""tune.kills-optuna*: what Optuna's heartbeats and retries lose under the kills, stalls and outages of tune.kills.

As Optuna's documentation recommends for workers that may die: `RDBStorage` with a heartbeat, the callback that puts
stale trials back into the queue, and an objective that resumes from the first try's checkpoint. The heartbeat and the
grace period are as long as our leases; a worker that has ended with an error is started again.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState

from benchmarks.harness import Bar, NotRun, stored
from benchmarks.tune.functions import optuna_warnings_off
from benchmarks.tune.kills import LEASE, PAUSE, STEPS, TRIALS, Disturber, disturbed
from benchmarks.tune.peers import PEER_BATCHES, peer_rows
from benchmarks.tune.postgresql import PostgresServer, programs
from benchmarks.tune.toy_trial import train, undisturbed
from benchmarks.tune.toy_worker import EVERY
from benchmarks.tune.workers import spawn
from shoestring.tune.database import engine_options

REPORT = 50
"""Steps between two values that a trial reports: a second, as often as our leases are renewed."""


@dataclass(frozen=True)
class OptunaSetting:
    """A study of toy trials, as a worker of Optuna's needs it."""

    url: str
    folder: str
    trials: int
    steps: int

    def study(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        optuna_warnings_off()
        storage = RDBStorage(
            self.url,
            engine_kwargs=engine_options(self.url),
            heartbeat_interval=round(LEASE / 3),
            grace_period=round(LEASE),
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
        )
        sampler = optuna.samplers.RandomSampler()
        return optuna.create_study(storage=storage, study_name="toy", sampler=sampler, load_if_exists=True)

    def objective(self, trial: Trial) -> float:
        # Optuna 5.0.0 refuses its own documentation's `retried_trial_number(trial)` here: it takes frozen trials alone.
        frozen = trial.study.get_trials(deepcopy=False)[trial.number]
        folder = Path(self.folder, f"trial-{_root(frozen)}")
        folder.mkdir(exist_ok=True)
        with (folder / "starts.log").open("a") as starts:
            starts.write(f"{trial.number}\n")
        for step, state in train(folder, trial.suggest_float("x", 0.0, 1.0), self.steps, EVERY, PAUSE):
            if step % REPORT == 0:
                trial.report(state, step)
        return json.loads((folder / "checkpoint.json").read_text())[1]


def _root(trial: FrozenTrial) -> int:
    """Number of the first try of a trial, which keeps the checkpoint."""
    first = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    return trial.number if first is None else first


def begin(setting: OptunaSetting) -> BaseProcess:
    """Start a worker."""
    return spawn(_work, setting)


def _work(setting: OptunaSetting) -> None:
    sys.stderr = Path(setting.folder, "workers.log").open("a")  # noqa: SIM115  # as long as the process
    study = setting.study()
    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < setting.trials:
        study.optimize(setting.objective, callbacks=[MaxTrialsCallback(setting.trials, states=(TrialState.COMPLETE,))])


def batch(number: int) -> dict[str, Any]:
    """One study under 100 kills, 10 stalls past the grace period and 2 outages; what became of it."""
    chance = random.Random(number)
    with TemporaryDirectory(prefix="tune-") as folder, PostgresServer() as server:
        setting = OptunaSetting(server.url, folder, TRIALS, STEPS)
        setting.study()
        disturber, outages = disturbed(lambda: begin(setting), server, chance)
        _finish(setting)
        return _outcome(setting, disturber) | {"outages": outages}


def _finish(setting: OptunaSetting) -> None:
    """Run what waits for a retry, until nothing has for longer than two grace periods."""
    study, until = setting.study(), time.monotonic() + 2 * LEASE
    while time.monotonic() < until:
        fail_stale_trials(study)
        if waiting := len(study.get_trials(deepcopy=False, states=(TrialState.WAITING,))):
            study.optimize(setting.objective, n_trials=waiting)
            until = time.monotonic() + 2 * LEASE
        time.sleep(0.5)


def _outcome(setting: OptunaSetting, disturber: Disturber) -> dict[str, Any]:
    trials = setting.study().get_trials()
    roots = {_root(trial) for trial in trials}
    results = Counter(_root(trial) for trial in trials if trial.state == TrialState.COMPLETE)
    wrong = [
        trial.number
        for trial in trials
        if trial.state == TrialState.COMPLETE and trial.value != undisturbed(trial.params["x"], setting.steps)
    ]
    folders = list(Path(setting.folder).glob("trial-*"))
    computed = sum(len((folder / "steps.log").read_text().split()) for folder in folders)
    useful = sum(max(map(int, (folder / "steps.log").read_text().split()), default=0) for folder in folders)
    starts = sum(len((folder / "starts.log").read_text().split()) for folder in folders)
    return {
        "trials": len(roots),
        "lost": sum(results[root] == 0 for root in roots),
        "running": sum(trial.state == TrialState.RUNNING for trial in trials),
        "twice": sum(count > 1 for count in results.values()),
        "wrong": len(wrong),
        "repeated": computed - useful,
        "starts": starts,
        "kills": disturber.done["kill"],
        "stalls": disturber.done["stall"],
        "crashes": disturber.done["crash"],
    }


# -- the bars ---------------------------------------------------------------------------------------------------------


def rows(runs: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars."""

    def measure() -> list[dict[str, Any]] | NotRun:
        if programs() is None:
            return NotRun("PostgreSQL is not installed")
        return [
            stored(runs / f"kills-optuna-{number}.json", check, lambda number=number: batch(number))
            for number in range(PEER_BATCHES)
        ]

    name = "Optuna's RDBStorage with heartbeats of 1 s, a grace period of 3 s, and RetryHeartbeatStaleTrialCallback"
    return peer_rows("optuna", name, measure, runs, check)


if __name__ == "__main__":
    print(batch(int(sys.argv[1])))
