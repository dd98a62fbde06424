"""A worker: leases trials one after another, runs each as a process, and loses none of them when it dies."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from shoestring.core.errors import ConfigError, nearest
from shoestring.tune.process import TrialProcess, end_former
from shoestring.tune.store import Store, TrialLease

log = logging.getLogger("shoestring")
T = TypeVar("T")

FINAL = 2
"""Exit code of a run whose error only the user can correct."""
PREEMPTED = (130, -signal.SIGTERM)
"""Exit codes of a run that others than its worker asked to stop: Slurm sends SIGTERM to every process of a job. It is
130 once the run has saved."""
HOPELESS = 3
"""Failed trials, beyond those that run and may yet report, after which a study without any value is given up."""
_TICK = 0.05
_AGAIN = "the corrected study needs another tune.name"


class Proposer(Protocol):
    """Where trials come from."""

    def propose(self, owner: str, seconds: float) -> TrialLease | None:
        """Lease a new trial, or one that a scheduler continues; None where there is none now."""
        ...

    def pause_at(self, lease: TrialLease) -> int | None:
        """Step at which a trial pauses to be compared with others; None if it runs to its end."""
        ...

    def publish(self, number: int | None = None) -> None:
        """Show in Optuna's tables that the trial of a number has ended, or all that nobody else will show."""
        ...

    def over(self) -> bool:
        """Whether every trial has ended and none will follow."""
        ...


@dataclass
class TrialWorker:
    """Leases trials until the study is over or `stop` is set; call `run` from a thread that lives as long.

    Args:
        start: begins (or continues) a leased trial in its folder.
        lease: seconds of a lease. grace: seconds that a trial has to save after SIGTERM.
        attempts: unexpected failures after which a trial is marked as failed.
        patience: seconds for which the store may be unreachable while the worker holds nothing.
        paused: called when a trial has paused, before any worker can continue it.
        tidy: called after each trial and at the end, to remove what trials that have ended left on this host.
    """

    store: Store
    proposer: Proposer
    start: Callable[[TrialLease], TrialProcess]
    lease: float
    grace: float = 30.0
    attempts: int = 3
    patience: float = 600.0
    stop: threading.Event = field(default_factory=threading.Event)
    paused: Callable[[TrialLease], None] = lambda lease: None
    tidy: Callable[[], None] = lambda: None
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}")

    def run(self) -> None:
        """Work until the study is over, or until `stop`; then the trial that runs is saved and given back.

        Raises:
            ConfigError: a run ended without the objective, which no trial has ever written; or several trials failed
                before any wrote it.
        """
        while not self.stop.is_set():
            asked = time.monotonic()
            lease = self._reach(self._next)
            if lease is not None and time.monotonic() < asked + self.lease:
                self._work(lease, asked)
                self._reach(self.tidy)
            elif self._reach(self.proposer.over):
                self._reach(self.tidy)
                return
            else:
                self.stop.wait(min(1.0, self.lease / 10))

    def _next(self) -> TrialLease | None:
        return self.store.take(self.name, self.lease) or self.proposer.propose(self.name, self.lease)

    def _work(self, lease: TrialLease, asked: float) -> None:
        """Run one trial under its lease, to its end, to its next pause, or until the lease is lost."""
        end_former(lease.place)
        held = Renewal(self.store, lease, self.lease, asked)
        trial = self.start(lease)
        held.place = trial.place
        held.start()
        try:
            stopped = self._watch(trial, held, self.proposer.pause_at(lease))
            if held.lost:
                log.warning("trial %d: the lease is lost, another worker continues it", lease.number)
                return
            self._conclude(lease, trial, held, stopped)
        finally:
            trial.close()
            held.end()

    def _watch(self, trial: TrialProcess, held: Renewal, pause: int | None) -> str:
        """Wait until the process has ended; return why it was asked to stop, if it was: "preempted" or "paused"."""
        why, until = "", math.inf
        while trial.poll() is None and not held.lost:
            held.add(trial.read(), trial.step, trial.tokens)
            paused = pause is not None and max(held.values, default=0) >= pause
            if not why and (self.stop.is_set() or paused):
                why, until = "paused" if paused else "preempted", time.monotonic() + self.grace
                trial.ask_to_stop()
            if time.monotonic() > until:
                trial.kill()
            time.sleep(_TICK)
        if held.lost:
            trial.kill()
        held.add(trial.read(), trial.step, trial.tokens)
        return why

    def _conclude(self, lease: TrialLease, trial: TrialProcess, held: Renewal, stopped: str) -> None:
        """Write what became of the trial; the last renewal has written what it reported."""
        code = trial.poll()
        if not self._reach(held.renew):
            return
        if code == 0:
            reports = self._reach(lambda: self.store.reports(lease.trial))
            value = reports[max(reports)] if reports else math.nan
            state, note = ("done", "") if math.isfinite(value) else ("failed", _unusable(trial, reports))
            self._reach(lambda: self.store.finish(lease, state, value if state == "done" else None, note))
            self._reach(lambda: self.proposer.publish(lease.number))
            if not reports and self._nothing_reported():
                hint = f"{nearest(trial.metric, trial.seen)}; {_AGAIN}"
                raise ConfigError(f"`tune.objective`: {note}", hint=hint)
        elif stopped or code in PREEMPTED:
            state = "paused" if stopped == "paused" else "ready"
            if state == "paused":
                self.paused(lease)
            self._reach(lambda: self.store.give_back(lease, state=state))
        elif code == FINAL or lease.attempts + 1 >= self.attempts:
            note = trial.last_words()
            self._reach(lambda: self.store.finish(lease, "failed", note=note))
            self._reach(lambda: self.proposer.publish(lease.number))
            states = [each.state for each in self._reach(self.store.trials)]
            failed = states.count("failed")
            if failed - states.count("held") >= HOPELESS and self._nothing_reported():
                raise ConfigError(f"{failed} trials failed and none has a result; the last: {note}", hint=_AGAIN)
        else:
            log.warning("trial %d ended with exit code %s and starts again", lease.number, code)
            self._reach(lambda: self.store.give_back(lease, failed=True, note=trial.last_words()))

    def _nothing_reported(self) -> bool:
        return not any(self._reach(self.store.all_reports).values())

    def _reach(self, request: Callable[[], T]) -> T:
        """Repeat a request until the store answers; every request may be made twice.

        Raises:
            DBAPIError: the store did not answer for `patience` seconds.
        """
        until, wait = time.monotonic() + self.patience, 0.05
        while True:
            try:
                return request()
            except _outages():
                if time.monotonic() > until:
                    raise
                time.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, 2.0)


def _outages() -> tuple[type[Exception], ...]:
    """What a store raises that does not answer, or that others keep busy."""
    from optuna.exceptions import StorageInternalError

    return DBAPIError, PoolTimeoutError, StorageInternalError


def _unusable(trial: TrialProcess, reports: Mapping[int, float]) -> str:
    if reports:
        return f"`{trial.metric}` became {reports[max(reports)]}"
    written = ", ".join(sorted(trial.seen - {"step", "time"})) or "nothing"
    return f"the run never wrote the objective `{trial.metric}`; it wrote: {written}"


class Renewal(threading.Thread):
    """Extends a lease three times while it lasts, and knows by this host's own clock when it may have ended.

    The deadline counts from before a request is sent, so it is never later than the store's. Past it the lease counts
    as lost even if the store cannot be asked, because another worker may have the trial by then.
    """

    def __init__(self, store: Store, lease: TrialLease, seconds: float, asked: float) -> None:
        super().__init__(daemon=True, name=f"lease of trial {lease.number}")
        self.store, self.lease, self.seconds = store, lease, seconds
        self.values: dict[int, float] = {}
        self.step, self.place, self.tokens, self._reported = lease.step, "", 0.0, 0.0
        self._deadline, self._worked, self._refused = asked + seconds, asked, False
        self._written: set[int] = set()
        self._ended, self._lock = threading.Event(), threading.Lock()

    @property
    def lost(self) -> bool:
        return self._refused or time.monotonic() > self._deadline

    def add(self, values: Mapping[int, float], step: int, tokens: float = 0.0) -> None:
        """Values of the objective, by step, and tokens of this attempt, for the next renewal to write."""
        self.values = self.values | dict(values)
        self.tokens = tokens
        self.step = max(self.step, step)

    def renew(self) -> bool:
        """Renew the lease now; False where it is lost."""
        with self._lock:
            asked, values = time.monotonic(), self.values
            new = {step: value for step, value in values.items() if step not in self._written}
            worked, tokens = asked - self._worked, self.tokens
            written = {"worked": worked, "tokens": tokens - self._reported, "place": self.place}
            if not self.store.renew(self.lease, self.seconds, step=self.step, reports=new, **written):
                self._refused = True
                return False
            self._written |= set(new)
            self._reported = tokens
            self._worked, self._deadline = asked, asked + self.seconds
            return True

    def run(self) -> None:
        while not self.lost:
            try:
                self.renew()
                wait = self.seconds / 3
            except _outages():
                wait = min(0.5, self.seconds / 10)
            if self._ended.wait(wait):
                return

    def end(self) -> None:
        self._ended.set()
        self.join(self.seconds)
