"""`shoestring tune`: search for the settings of a run, on workers that may vanish; importing this imports no torch."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
from tyro.conf import Positional

from shoestring.commands.study import ENVIRONMENT, StudyPlan, join_plan, read_plan
from shoestring.commands.trials import Leftovers, describe, keep_for_forks, start_trial
from shoestring.core.errors import ConfigError
from shoestring.storage.whole import write_atomic

if TYPE_CHECKING:
    from shoestring.tune.store import Store, TrialLease

_URL = "SHOESTRING_TUNE_STORE"
"""Environment variable in which the workers of this host get the store's URL."""


@dataclass(frozen=True)
class Tune:
    """Search for the settings of a run, on workers that may join, leave or vanish at any time."""

    what: Positional[tuple[str, ...]]
    """Study file to start or continue; or `join URL [NAME]`, to work for the study of a store; or `best [FILE]`, to
    write the run file of the best trial of a study file, which defaults to tune.toml; or `page [FILE [OTHERS]]`, to
    write the page of a study, with what other studies needed for the same result."""
    workers: int = 1
    """Number of workers to start on this host; each runs one trial at a time."""
    out: Path | None = None
    """Path of the run file (best) or page (page) to write; defaults to run.toml, and to study.html in the folder of the
    study."""

    def __call__(self, overrides: Sequence[str]) -> int:
        if self.workers < 1:
            raise ConfigError(f"--workers must be at least 1, got {self.workers}")
        match self.what:
            case ("join",):
                raise ConfigError("`join` needs the URL of a store", hint="shoestring tune join URL [NAME]")
            case ("join", url):
                plan = join_plan(url, "")
            case ("join", url, name):
                plan = join_plan(url, name)
            case ("best", *rest) if len(rest) < 2:
                plan = read_plan(rest[0] if rest else "tune.toml")
                print("\n".join(write_best(plan, self.out or Path("run.toml"))))
                return 0
            case ("page", *rest):
                print(write_page([read_plan(file) for file in rest or ["tune.toml"]], self.out))
                return 0
            case (file,):
                plan = read_plan(file)
                plan.open_store(create=True)
            case _:
                raise ConfigError(
                    "a study is missing", hint="shoestring tune tune.toml, join URL, best --out run.toml, or page"
                )
        if self.workers > 1:
            return start_workers(plan, self.workers)
        return work(plan, page=self.what[0] != "join")


# -- work -------------------------------------------------------------------------------------------------------------


def work(plan: StudyPlan, *, page: bool) -> int:
    """Work on a study in this process until it is over, or until SIGTERM or SIGINT; the exit code."""
    from shoestring.tune.progress import StudyProgress
    from shoestring.tune.search import TrialSearch
    from shoestring.tune.worker import TrialWorker

    store, study, stop = plan.open_store(), plan.study, threading.Event()
    worker = TrialWorker(
        store,
        TrialSearch(store, study, plan.space, plan.schedule, plan.total_steps),
        lambda lease: start_trial(plan, lease),
        study.lease,
        study.grace,
        study.attempts,
        stop=stop,
        paused=lambda lease: keep_for_forks(plan, lease),
        tidy=Leftovers(plan, store).remove,
    )
    progress = StudyProgress(lambda: plan.record(store), plan.total_steps)
    if progress.drawn:
        logging.getLogger("shoestring").setLevel(logging.WARNING)
    with _signals(lambda _: stop.set()), progress:
        worker.run()
    print("\n".join(summary(plan, store)))
    if page:
        print(f"page: {write_page([plan])}")
    return 130 if stop.is_set() else 0


def start_workers(plan: StudyPlan, number: int) -> int:
    """Start workers as processes of their own, hand signals on to them, and wait for all; the largest exit code."""
    from shoestring.tune.progress import StudyProgress

    # The URL may hold a password: arguments are shown to every user of the host, the environment is not.
    command = [sys.executable, "-m", "shoestring", "tune", "join", f"{ENVIRONMENT}{_URL}", plan.study.name]
    environment = os.environ | {_URL: plan.url}
    store = plan.open_store()
    logs = [plan.folder / "workers" / f"{os.getpid()}-{index}.log" for index in range(number)]
    logs[0].parent.mkdir(exist_ok=True)
    workers = []
    for log in logs:
        with log.open("ab") as out:
            worker = subprocess.Popen(command, start_new_session=True, env=environment, stdout=out, stderr=out)
        workers.append(worker)

    def hand_on(received: int) -> None:
        for worker in workers:
            if worker.poll() is None:
                os.kill(worker.pid, received)

    with _signals(hand_on), StudyProgress(lambda: plan.record(store), plan.total_steps):
        codes = [abs(worker.wait()) for worker in workers]
    for log, code in zip(logs, codes, strict=True):
        if code not in (0, 130):
            print(f"a worker ended with exit code {code}{_error(log)}; its log is {log}", file=sys.stderr)
    print("\n".join(summary(plan, store)))
    print(f"page: {write_page([plan])}")
    return max(codes)


def _error(log: Path) -> str:
    """The error that a worker's log ends with, if it is one of the user's."""
    errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    return f" ({errors[-1]})" if errors else ""


@contextmanager
def _signals(received: Callable[[int], None]) -> Iterator[None]:
    """Call a function on SIGINT and SIGTERM, in place of what they do otherwise."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda which, _: received(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- results ----------------------------------------------------------------------------------------------------------


def best(plan: StudyPlan, store: Store) -> TrialLease | None:
    """The trial with the best result, if any has one."""
    done = [trial for trial in store.trials() if trial.state == "done" and trial.value is not None]
    sign = 1 if plan.study.direction == "minimize" else -1
    return min(done, key=lambda trial: sign * (trial.value or 0.0), default=None)


def summary(plan: StudyPlan, store: Store) -> list[str]:
    """The state of a study in a few lines."""
    trials = store.trials()
    states = [trial.state for trial in trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no trials"
    lines = [f"study {plan.study.name}: {counts}"]
    if leader := best(plan, store):
        lines.append(f"best: trial {leader.number}, {plan.study.objective} {leader.value:.6g}")
        lines += [f"  {settings}" for settings in lineage(trials, leader)]
    return lines


def lineage(trials: Sequence[TrialLease], trial: TrialLease) -> list[str]:
    """The settings of a trial, one line for each trial that it descends from, the oldest first."""
    by_number = {each.number: each for each in trials}
    line, until = [], ""
    while True:
        since = f"from comparison {trial.forked}" if trial.parent >= 0 else ""
        when = ", ".join(filter(None, (since, until)))
        line.insert(0, f"{describe(trial.parameters)}" + (f" (trial {trial.number}, {when})" if when else ""))
        if trial.parent < 0:
            return line
        until, trial = f"until comparison {trial.forked}", by_number[trial.parent]


def write_best(plan: StudyPlan, out: Path) -> list[str]:
    """Write the run file of the best trial; what to say about it.

    Raises:
        ConfigError: no trial has ended, or the file cannot be written.
    """
    store = plan.open_store()
    leader = best(plan, store)
    if leader is None:
        raise ConfigError(f"no trial of the study `{plan.study.name}` has a result yet")
    try:
        write_atomic(out, tomli_w.dumps(plan.run_document(leader.parameters)).encode())
    except OSError as error:
        raise ConfigError(f"cannot write `{out}`: {error.strerror}", hint="choose another --out") from error
    return [*summary(plan, store), f"written to {out}; start it with: shoestring train {out}"]


def write_page(plans: Sequence[StudyPlan], out: Path | None = None) -> Path:
    """Write the page of the first study, beside the others; its path.

    Raises:
        ConfigError: a study has not begun, or others have another objective.
        ShoestringError: the page cannot be written.
    """
    records = [plan.record(plan.open_store()) for plan in plans]
    for record in records[1:]:
        if record.study.objective != records[0].study.objective or record.sign != records[0].sign:
            raise ConfigError(f"the study `{record.study.name}` has another objective, so it cannot be compared")
    from shoestring.tune.view.page import write

    return write(records, out or plans[0].folder / "study.html")
