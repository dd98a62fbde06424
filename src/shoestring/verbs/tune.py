"""`shoestring tune`: searches for the best settings of a run, with workers that may disappear at any time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from shoestring.core.errors import ConfigError
from shoestring.processors import processors
from shoestring.storage.foreign import one_line
from shoestring.storage.whole import write_atomic
from shoestring.verbs.study import ENVIRONMENT, StudyPlan, join_plan, read_plan
from shoestring.verbs.trials import PRELOADED, Leftovers, describe, keep_for_forks, start_trial

if TYPE_CHECKING:
    from shoestring.tune.store import Store, TrialLease

warn = logging.getLogger("shoestring").warning

_URL = "SHOESTRING_TUNE_STORE"
"""Environment variable that passes the store's URL to the workers of this host."""


@dataclass(frozen=True)
class StudyOutcome:
    """The state of a study after the workers of this host have ended."""

    lines: list[str]
    """Lines that describe the state; if a page was written, the last line names it."""
    code: int
    """Exit code: 0 if the study is over and has a result, 1 if it has no result, 130 after a signal; otherwise the
    workers' exit code."""


def tune(file: Path, workers: int = 1) -> StudyOutcome:
    """Start or continue the study of a file, and run trials until the study is over, or SIGTERM or SIGINT arrives.

    Raises:
        ConfigError: the study file is wrong, or its store cannot be used.
    """
    plan = read_plan(str(file))
    plan.open_store(create=True)
    return _begin(plan, workers, page=True)


def join(store: str, name: str = "", workers: int = 1, *, trust: bool = False) -> StudyOutcome:
    """Run trials of a study that another machine started, until the study is over, or SIGTERM or SIGINT arrives.

    For the arguments and errors, see `study.join_plan`.
    """
    return _begin(join_plan(store, name, trust=trust), workers, page=False)


def _begin(plan: StudyPlan, workers: int, *, page: bool) -> StudyOutcome:
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    return _start_workers(plan, workers) if workers > 1 else _work(plan, page=page)


def _work(plan: StudyPlan, *, page: bool) -> StudyOutcome:
    """Run trials of a study in this process."""
    from shoestring.tune.process import TrialServer
    from shoestring.tune.progress import StudyProgress
    from shoestring.tune.search import TrialSearch
    from shoestring.tune.worker import TrialWorker

    store, study, stop = plan.open_store(), plan.study, threading.Event()
    server = TrialServer(PRELOADED)
    worker = TrialWorker(
        store,
        TrialSearch(store, study, plan.space, plan.schedule, plan.total_steps),
        lambda lease: start_trial(plan, lease, server),
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
    with closing(server), _signals(lambda _: stop.set()), progress:
        worker.run()
    lines = [*summary(plan, store), *([f"page: {write_page([plan])}"] if page else [])]
    return StudyOutcome(lines, 130 if stop.is_set() else int(best(plan, store) is None))


def _start_workers(plan: StudyPlan, number: int) -> StudyOutcome:
    """Start workers as processes, forward signals to them, and wait until all workers have ended."""
    from shoestring.tune.progress import StudyProgress
    from shoestring.tune.search import TrialSearch

    # The URL may contain a password. All users of the host can see the arguments of a process, but not its environment.
    command = [
        sys.executable,
        "-P",
        "-m",
        "shoestring",
        "tune",
        "join",
        f"{ENVIRONMENT}{_URL}",
        plan.study.name,
        "--trust",
    ]
    # Trials share the cores. If each trial had a thread for every core, the trials would slow each other down.
    environment = {"OMP_NUM_THREADS": str(max(1, processors() // number))} | os.environ | {_URL: plan.url}
    store = plan.open_store()
    logs = [plan.folder / "workers" / f"{os.getpid()}-{index}.log" for index in range(number)]
    logs[0].parent.mkdir(exist_ok=True)
    workers = []
    for log in logs:
        with log.open("ab") as out:
            worker = subprocess.Popen(command, start_new_session=True, env=environment, stdout=out, stderr=out)
        workers.append(worker)

    def forward(received: int) -> None:
        for worker in workers:
            if worker.poll() is None:
                os.kill(worker.pid, received)

    with _signals(forward), StudyProgress(lambda: plan.record(store), plan.total_steps):
        codes = [worker.wait() for worker in workers]
    for log, code in zip(logs, codes, strict=True):
        if code not in (0, 130):
            how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("error: ")]  # messages that are meant for users
            message = f" ({one_line(errors[-1])})" if errors else ""
            warn("a worker ended %s%s; its log is %s", how, message, log)
    lines = [*summary(plan, store), f"page: {write_page([plan])}"]
    if 130 in codes:
        return StudyOutcome(lines, 130)
    # A worker exits with 0 or 1 once the study is over. If no worker did so, the study may still be over: the last
    # worker may have died just after the end.
    search = TrialSearch(store, plan.study, plan.space, plan.schedule, plan.total_steps)
    if 0 in codes or search.over():
        return StudyOutcome(lines, int(best(plan, store) is None))
    warn("the study is not over; the same command continues it")
    return StudyOutcome(lines, max(1, *codes))


@contextmanager
def _signals(received: Callable[[int], None]) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM call a function."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda which, _: received(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- results ----------------------------------------------------------------------------------------------------------


def best(plan: StudyPlan, store: Store) -> TrialLease | None:
    """The trial with the best result; None if no trial has a result."""
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
    """The settings of a trial and of the trials that it descends from, one line for each trial, the oldest first."""
    by_number = {member.number: member for member in trials}
    line, until = [], ""
    while True:
        since = f"from comparison {trial.forked}" if trial.parent >= 0 else ""
        when = ", ".join(filter(None, (since, until)))
        line.insert(0, f"{describe(trial.parameters)}" + (f" (trial {trial.number}, {when})" if when else ""))
        if trial.parent < 0:
            return line
        until, trial = f"until comparison {trial.forked}", by_number[trial.parent]


def write_best(file: Path, out: Path) -> list[str]:
    """Write the run file of the best trial of a study, and return lines with the state of the study.

    Raises:
        ConfigError: no trial has a result, or the file cannot be written.
    """
    plan = read_plan(str(file), look=True)
    store = plan.open_store()
    leader = best(plan, store)
    if leader is None:
        raise ConfigError(f"no trial of the study `{plan.study.name}` has a result yet")
    try:
        write_atomic(out, tomli_w.dumps(plan.run_document(leader.parameters)).encode())
    except OSError as error:
        raise ConfigError(f"cannot write `{out}`: {error.strerror}", hint="choose another --out") from error
    return [*summary(plan, store), f"written to {out}; start it with: shoestring train {out}"]


def compare_studies(files: Sequence[Path], out: Path | None = None) -> Path:
    """Write a page that shows the first study and compares it with the others, and return the path of the page.

    Raises:
        ConfigError: a study has not begun, or the studies have different objectives.
        ShoestringError: the page cannot be written.
    """
    return write_page([read_plan(str(file), look=True) for file in files], out)


def write_page(plans: Sequence[StudyPlan], out: Path | None = None) -> Path:
    """Write the page of `compare_studies` for studies that have already been read."""
    records = [plan.record(plan.open_store()) for plan in plans]
    for record in records[1:]:
        if record.study.objective != records[0].study.objective or record.sign != records[0].sign:
            raise ConfigError(f"the study `{record.study.name}` has a different objective, so it cannot be compared")
    from shoestring.tune.view.page import write

    return write(records, out or plans[0].folder / "study.html")
