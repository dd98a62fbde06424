"""`shoestring tune`: search for the settings of a run, on workers that may vanish; importing this imports no torch."""

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
from typing import TYPE_CHECKING, Annotated

import tomli_w
from tyro.conf import Positional, arg, subcommand

from shoestring.commands.study import ENVIRONMENT, StudyPlan, join_plan, read_plan
from shoestring.commands.trials import PRELOADED, Leftovers, describe, keep_for_forks, start_trial
from shoestring.core.errors import ConfigError
from shoestring.planning.system import cores
from shoestring.storage.whole import write_atomic

if TYPE_CHECKING:
    from shoestring.tune.store import Store, TrialLease

_URL = "SHOESTRING_TUNE_STORE"
"""Environment variable in which the workers of this host get the store's URL."""


@dataclass(frozen=True)
class StartStudy:
    """Start or continue a study, and work for it until it is over."""

    file: Positional[Path] = Path("tune.toml")
    """Path of the study file."""
    workers: int = 1
    """Number of workers to start on this host; each runs one trial at a time."""

    def run(self) -> int:
        plan = read_plan(str(self.file))
        plan.open_store(create=True)
        return _begin(plan, self.workers, page=True)


@dataclass(frozen=True)
class JoinStudy:
    """Work for a study that another machine has started."""

    store: Positional[str]
    """URL of the store; env:NAME takes it from the environment variable NAME."""
    name: Positional[str] = ""
    """Name of the study; needed only where the store holds several."""
    workers: int = 1
    """Number of workers to start on this host; each runs one trial at a time."""

    def run(self) -> int:
        return _begin(join_plan(self.store, self.name), self.workers, page=False)


@dataclass(frozen=True)
class WriteBest:
    """Write the run file of the best trial so far."""

    file: Positional[Path] = Path("tune.toml")
    """Path of the study file."""
    out: Path = Path("run.toml")
    """Path of the run file to write."""

    def run(self) -> int:
        print("\n".join(write_best(read_plan(str(self.file)), self.out)))
        return 0


@dataclass(frozen=True)
class WritePage:
    """Write the page of a study, beside others that had the same objective."""

    files: Positional[tuple[Path, ...]] = (Path("tune.toml"),)
    """Study files: of the study that the page shows, and of those whose hours it is compared with."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """Path of the page to write; defaults to study.html in the folder of the study."""

    def run(self) -> int:
        print(write_page([read_plan(str(file)) for file in self.files], self.out))
        return 0


@dataclass(frozen=True)
class Tune:
    """Search for the settings of a run, on workers that may join, leave or vanish at any time: `shoestring tune
    tune.toml`."""

    action: (
        Annotated[StartStudy, subcommand("run", prefix_name=False)]
        | Annotated[JoinStudy, subcommand("join", prefix_name=False)]
        | Annotated[WriteBest, subcommand("best", prefix_name=False)]
        | Annotated[WritePage, subcommand("page", prefix_name=False)]
    )
    """Action on a study; `run` may be left out."""

    def __call__(self, overrides: Sequence[str]) -> int:
        return self.action.run()


ACTIONS = ("run", "join", "best", "page")


def with_action(arguments: Sequence[str]) -> list[str]:
    """What follows `shoestring tune`, with the `run` that may be left out."""
    return list(arguments) if arguments[:1] and arguments[0] in (*ACTIONS, "--help", "-h") else ["run", *arguments]


# -- work -------------------------------------------------------------------------------------------------------------


def _begin(plan: StudyPlan, workers: int, *, page: bool) -> int:
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    return start_workers(plan, workers) if workers > 1 else work(plan, page=page)


def work(plan: StudyPlan, *, page: bool) -> int:
    """Work on a study in this process until it is over, or until SIGTERM or SIGINT.

    Returns: the exit code, 130 after a signal, 1 where no trial has a result.
    """
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
    print("\n".join(summary(plan, store)))
    if page:
        print(f"page: {write_page([plan])}")
    return 130 if stop.is_set() else int(best(plan, store) is None)


def start_workers(plan: StudyPlan, number: int) -> int:
    """Start workers as processes of their own, hand signals on to them, and wait for all; the largest exit code."""
    from shoestring.tune.progress import StudyProgress

    # The URL may hold a password: arguments are shown to every user of the host, the environment is not.
    command = [sys.executable, "-m", "shoestring", "tune", "join", f"{ENVIRONMENT}{_URL}", plan.study.name]
    # Trials that each take all cores wait for each other.
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // number))} | os.environ | {_URL: plan.url}
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
