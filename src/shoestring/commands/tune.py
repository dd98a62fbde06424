"""`shoestring tune`: search for the settings of a run, on workers that may vanish; importing this imports no torch."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from tyro.conf import Positional

from shoestring.core.errors import ConfigError, nearest
from shoestring.storage.whole import write_atomic
from shoestring.tune import Dimension, Halving, Study
from shoestring.tune.space import draw, read_space

if TYPE_CHECKING:
    from shoestring.tune.process import TrialProcess
    from shoestring.tune.store import Store, TrialLease

log = logging.getLogger("shoestring")

TABLES = ("tune", "space", "halving")


@dataclass(frozen=True)
class Tune:
    """Search for the settings of a run, on workers that may join, leave or vanish at any time."""

    what: Positional[tuple[str, ...]]
    """Study file to start or continue; or `join URL [NAME]`, to work for the study of a store; or `best [FILE]`, to
    write the run file of the best trial of a study file, which defaults to tune.toml."""
    workers: int = 1
    """Number of workers to start on this host; each runs one trial at a time."""
    out: Path = Path("run.toml")
    """Path of the run file to write (best)."""

    def __call__(self, overrides: Sequence[str]) -> int:
        match self.what:
            case ("join", url):
                plan = _joined(url, "")
            case ("join", url, name):
                plan = _joined(url, name)
            case ("best", *rest) if len(rest) < 2:
                print("\n".join(write_best(read_plan(rest[0] if rest else "tune.toml"), self.out)))
                return 0
            case (file,) if file != "join":
                plan = read_plan(file)
                plan.open_store(create=True)
            case _:
                raise ConfigError(
                    "a study is missing", hint="shoestring tune tune.toml, join URL, or best --out run.toml"
                )
        if self.workers < 1:
            raise ConfigError(f"--workers must be at least 1, got {self.workers}")
        if self.workers > 1:
            return start_workers(plan, self.workers)
        return work(plan)


@dataclass(frozen=True)
class StudyPlan:
    """A study and the document of the run whose settings it searches."""

    study: Study
    space: tuple[Dimension, ...]
    halving: Halving | None
    tables: Mapping[str, Any]
    """The study file."""
    base: Mapping[str, Any]
    """The run file."""

    @property
    def folder(self) -> Path:
        return Path(self.study.folder or Path("tune") / self.study.name).absolute()

    @property
    def url(self) -> str:
        return self.study.store or f"sqlite:///{self.folder / 'store.db'}"

    @property
    def document(self) -> dict[str, Any]:
        """What the store keeps, from which a worker on another host begins."""
        tables = {**self.tables, "tune": asdict(self.study) | {"folder": str(self.folder)}}
        return {"study": tables, "run": dict(self.base)}

    @property
    def total_steps(self) -> float:
        """Steps of a trial; infinite where they are not known before it starts."""
        from shoestring import run

        settings = run.parse(self.base).settings
        searched = any(dimension.key == "run.steps" for dimension in self.space)
        return math.inf if searched or settings.minutes or settings.epochs else settings.steps

    def open_store(self, *, create: bool = False) -> Store:
        """The study's store.

        Raises:
            ConfigError: it cannot be used, or is of another version or study.
        """
        _require_packages()
        from shoestring.tune.store import Store, connect

        try:
            if create:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write `{self.folder}`: {error.strerror}", hint="set tune.folder") from error
        store = Store(connect(self.url), self.study.name)
        if create:
            store.create(self.document)
        else:
            store.document()  # it exists, and is of this version
        return store

    def run_document(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The run file with these values of the space."""
        from shoestring import run

        document = copy.deepcopy(dict(self.base))
        run.override(document, [f"--{key}={json.dumps(value)}" for key, value in values.items()])
        return document


# -- the study file ---------------------------------------------------------------------------------------------------


def read_plan(source: str) -> StudyPlan:
    """Read a study file and the run file that it names, and check that every end of the space makes a valid run.

    Raises:
        ConfigError: a file cannot be read, or a table, key or range is wrong.
    """
    from shoestring import run

    tables = _toml(Path(source), "study file")
    study = _settings(tables, source)
    return _checked(tables, _toml(run.locate(study.run), "run file"), source)


def _settings(tables: Mapping[str, Any], source: str) -> Study:
    from shoestring.settings import structure

    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"{source}: unknown table [{name}]", hint=nearest(name, TABLES))
    return structure(tables.get("tune", {}), Study, "tune", source)


def _checked(tables: Mapping[str, Any], base: Mapping[str, Any], source: str) -> StudyPlan:
    from shoestring import run
    from shoestring.settings import structure

    study = _settings(tables, source)
    halving = structure(tables["halving"], Halving, "halving", source) if "halving" in tables else None
    plan = StudyPlan(study, read_space(tables.get("space", {}), source), halving, tables, base)
    for dimension in plan.space:
        if dimension.key in ("run.folder", "run.resume"):
            raise ConfigError(f"{source}: [space] `{dimension.key}` is the study's own to set")
        for value in dimension.ends:
            given = draw(plan.space, lambda each: each.ends[0]) | {dimension.key: value}
            run.parse(plan.run_document(given), name=study.name, source=f"{source}: [space]")
    return plan


def _toml(path: Path, kind: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} `{path}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not TOML: {error}") from error


def _joined(url: str, name: str) -> StudyPlan:
    """The study of a store that another worker has created."""
    _require_packages()
    from shoestring.tune.store import Store, connect

    engine = connect(url)
    if not name:
        names = Store(engine, "").names()
        if len(names) != 1:
            held = f"it holds: {', '.join(names)}" if names else "it holds none"
            raise ConfigError("name the study of the store: shoestring tune join URL NAME", hint=held)
        (name,) = names
    document = Store(engine, name).document()
    tables = copy.deepcopy(document["study"])
    tables["tune"]["store"] = url  # as this host reaches it
    return _checked(tables, document["run"], f"the study {name}")


def _require_packages() -> None:
    try:
        import optuna
        import scipy  # noqa: F401

        _ = optuna.__version__
    except ImportError as error:
        raise ConfigError(f"tuning needs {error.name}", hint="pip install shoestring[tune]") from error


# -- work -------------------------------------------------------------------------------------------------------------


def work(plan: StudyPlan) -> int:
    """Work on a study in this process until it is over, or until SIGTERM or SIGINT; the exit code."""
    from shoestring.tune.search import TrialSearch
    from shoestring.tune.worker import TrialWorker

    store = plan.open_store()
    search = TrialSearch(store, plan.study, plan.space, plan.halving, plan.total_steps)
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    study = plan.study
    worker = TrialWorker(
        store, search, lambda lease: start_trial(plan, lease), study.lease, study.grace, study.attempts, stop=stop
    )
    try:
        worker.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print("\n".join(summary(plan, store)))
    return 130 if stop.is_set() else 0


def start_trial(plan: StudyPlan, lease: TrialLease) -> TrialProcess:
    """Begin a trial, or continue it from its newest checkpoint."""
    from shoestring.tune.process import TrialProcess

    folder = plan.folder / f"trial-{lease.number:04d}"
    document = plan.run_document(lease.parameters)
    document["run"] = document.get("run", {}) | {"folder": str(folder), "resume": "auto"}
    file = plan.folder / "runs" / f"trial-{lease.number:04d}.toml"
    write_atomic(file, tomli_w.dumps(document).encode())
    log.info("trial %d: %s", lease.number, describe(lease.parameters))
    return TrialProcess([sys.executable, "-m", "shoestring", "train", str(file)], folder, plan.study.objective)


def start_workers(plan: StudyPlan, number: int) -> int:
    """Start workers as processes of their own, hand signals on to them, and wait for all; the largest exit code."""
    command = [sys.executable, "-m", "shoestring", "tune", "join", plan.url, plan.study.name]
    workers = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]

    def hand_on(received: int, _: object) -> None:
        for worker in workers:
            if worker.poll() is None:
                os.kill(worker.pid, received)

    before = {each: signal.signal(each, hand_on) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        return max(abs(worker.wait()) for worker in workers)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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
        lines.append(f"  {describe(leader.parameters)}")
    return lines


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


def describe(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}" for key, value in values.items()
    )
