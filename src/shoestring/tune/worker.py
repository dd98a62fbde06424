"""A study's worker: leases trials and runs each trial as a process; if it dies, another worker continues its trial."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from shoestring.core.errors import ConfigError, ShoestringError, WorldError, nearest
from shoestring.tune.database import StoreOutageError, usable
from shoestring.tune.process import TrialProcess, end_former
from shoestring.tune.store import Store, TrialLease

log = logging.getLogger("shoestring")
T = TypeVar("T")

FINAL = 2
"""Exit code of a run that ended with an error that only the user can correct."""
PREEMPTED = (130, -signal.SIGTERM)
"""Exit codes of a run that was preempted by another program than its worker; Slurm, for example, sends SIGTERM to every
process of a job. 130 means that the run has written its checkpoint."""
HOPELESS = 3
"""A study without any reported value is given up when the number of trials that failed for the same cause exceeds the
number of running trials by this many. Running trials are subtracted because they may still report a value. Diverged
trials do not count, because another learning rate may do better."""
DIVERGED = "diverged: "
_TICK = 0.05
_QUIET = 1.0
"""Length of the pause between two requests, in seconds, above which an outage is logged."""
_STARTS = 3
"""Number of attempts to start a trial's process."""
_AGAIN = "the corrected study needs another tune.name"


class Proposer(Protocol):
    """Interface of a source of trials."""

    def propose(self, owner: str, seconds: float) -> TrialLease | None:
        """Lease a new trial, or a paused trial that continues; None if no trial can run now."""
        ...

    def pause_at(self, lease: TrialLease) -> int | None:
        """Step at which a trial pauses for a comparison; None if the trial runs to its end."""
        ...

    def publish(self, number: int | None = None) -> None:
        """Copy ended trial `number` to Optuna's tables; if None, all ended trials that no other worker will copy."""
        ...

    def over(self) -> bool:
        """Whether all trials have ended and no new trial will start."""
        ...


@dataclass
class TrialWorker:
    """Leases and runs trials, one at a time, until the study is over or `stop` is set.

    Call `run` from a thread that outlives the trials, because the kernel kills a trial when the thread that forked its
    server ends.

    Args:
        start: function that starts or continues a leased trial in its folder.
        lease: duration of a lease in seconds.
        grace: seconds that a trial has to write a checkpoint after SIGTERM.
        attempts: number of unexpected failures after which a trial is marked as failed.
        patience: seconds for which a request to an unreachable store is repeated.
        paused: function called when a trial has paused, before any worker can continue the trial.
        tidy: function called after each trial and at the end, to remove files of ended trials from this host.
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
        """Run trials until the study is over or `stop` is set; then checkpoint and give back the running trial.

        Raises:
            ConfigError: a run ended without writing the objective, and no trial has written it; several trials failed
                for one cause before any trial wrote the objective; or the store is gone or refuses a request.
            StoreOutageError: the store did not respond for `patience` seconds.
            WorldError: no process for trials can be started on this host.
        """
        while not self.stop.is_set():
            asked = time.monotonic()
            lease = self._reach(
                lambda: self.store.take(self.name, self.lease) or self.proposer.propose(self.name, self.lease)
            )
            if lease is not None and time.monotonic() < asked + self.lease:
                self._work(lease, asked)
                self._reach(self.tidy)
            elif self._reach(self.proposer.over):
                self._reach(self.tidy)
                return
            else:
                self.stop.wait(min(1.0, self.lease / 10))

    def _work(self, lease: TrialLease, asked: float) -> None:
        """Run one leased trial: to its end, to its next pause, or until the lease is lost.

        Args:
            asked: monotonic time just before the lease was requested, from which the duration of the lease counts.
        """
        end_former(lease.place)
        held = Renewal(self.store, lease, self.lease, asked)
        trial = self._begin(lease)
        if trial is None:
            return
        held.place = trial.place
        held.start()
        try:
            stopped = self._watch(trial, held, self.proposer.pause_at(lease))
            if held.failure is not None:
                raise held.failure
            if held.lost:
                log.warning("trial %d: the lease is lost, another worker continues the trial", lease.number)
                return
            self._conclude(lease, trial, held, stopped)
        finally:
            trial.close()
            held.end()

    def _begin(self, lease: TrialLease) -> TrialProcess | None:
        """Start a trial's process; None if this worker was asked to stop. If none starts, the lease is given back.

        Raises:
            WorldError: no process can be started.
        """
        reason = ""
        try:
            for _ in range(_STARTS):
                if self.stop.is_set():
                    break
                try:
                    return self.start(lease)
                except RuntimeError as error:  # the server was killed; the next attempt starts a new server
                    reason = str(error)
                    log.warning("trial %d: %s; starting a new server", lease.number, reason)
        except BaseException:
            self._reach(lambda: self.store.give_back(lease))
            raise
        self._reach(lambda: self.store.give_back(lease))
        if self.stop.is_set():
            return None
        raise WorldError(f"no process for trials can be started on this host: {reason}")

    def _watch(self, trial: TrialProcess, held: Renewal, pause: int | None) -> str:
        """Wait until the process has ended; return "preempted" or "paused" if it was asked to stop, else ""."""
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
        """Write to the store how the trial's process ended: a result, a pause, a failure, or another attempt."""
        code = trial.poll()
        if not self._reach(held.renew):
            return
        if code == 0:
            reports = self._reach(lambda: self.store.reports(lease.trial))
            value = reports[max(reports)] if reports else math.nan
            state, note = "done" if math.isfinite(value) else "failed", ""
            if state == "failed" and reports:
                note = f"`{trial.metric}` became {value}"
            elif state == "failed":
                written = ", ".join(sorted(trial.seen - {"step", "time"})) or "nothing"
                note = f"the run never wrote the objective `{trial.metric}`; it wrote: {written}"
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
            note = f"{DIVERGED * trial.diverged()}{trial.last_words()}"
            self._reach(lambda: self.store.finish(lease, "failed", note=note))
            self._reach(lambda: self.proposer.publish(lease.number))
            trials = self._reach(self.store.trials)
            alike = sum(other.state == "failed" and _cause(other.note) == _cause(note) for other in trials)
            running = sum(other.state == "held" for other in trials)
            if not note.startswith(DIVERGED) and alike - running >= HOPELESS and self._nothing_reported():
                raise ConfigError(
                    f"{alike} trials failed, and no trial has a result; the last error: {note}", hint=_AGAIN
                )
        else:
            note = trial.last_words()
            log.warning("trial %d ended with exit code %s and starts again: %s", lease.number, code, note)
            self._reach(lambda: self.store.give_back(lease, failed=True, note=note))

    def _nothing_reported(self) -> bool:
        return not any(self._reach(self.store.all_reports).values())

    def _reach(self, request: Callable[[], T]) -> T:
        """Repeat a request until the store responds; every request must be idempotent.

        Raises:
            StoreOutageError: the store did not respond for `patience` seconds.
            ConfigError: the store refuses the request, so repeating it is useless.
        """
        until, wait, told = time.monotonic() + self.patience, 0.05, False
        while True:
            try:
                with usable(self.store.engine):  # also covers requests over Optuna's connections
                    return request()
            except StoreOutageError as error:
                if time.monotonic() > until:
                    raise
                if not told and wait > _QUIET:
                    told = True
                    log.warning("%s; trying again for %.0f s", error, self.patience)
                time.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, 2.0)


def _cause(note: str) -> str:
    """A trial's error message, with numbers replaced by 0, because numbers differ between trials."""
    return re.sub(r"[\d.]+", "0", note)


class Renewal(threading.Thread):
    """Renews a lease every third of its duration, and detects by this host's clock that the lease may be lost.

    The deadline is computed from the time before a request is sent, so it is never later than the store's deadline.
    After the deadline, the lease counts as lost even if the store cannot be reached, because another worker may already
    have the trial.
    """

    def __init__(self, store: Store, lease: TrialLease, seconds: float, asked: float) -> None:
        super().__init__(daemon=True, name=f"lease of trial {lease.number}")
        self.store, self.lease, self.seconds = store, lease, seconds
        self.values: dict[int, float] = {}
        self.step, self.place, self.tokens, self._reported = lease.step, "", 0.0, 0.0
        self._deadline, self._worked, self._refused = asked + seconds, asked, False
        self._written: set[int] = set()
        self.failure: ShoestringError | None = None
        """The error with which the store refused a write for this trial; None if no write was refused."""
        self._ended, self._lock = threading.Event(), threading.Lock()

    @property
    def lost(self) -> bool:
        return self._refused or self.failure is not None or time.monotonic() > self._deadline

    def add(self, values: Mapping[int, float], step: int, tokens: float = 0.0) -> None:
        """Add values of the objective by step, and set this attempt's tokens, for the next renewal to write."""
        self.values = self.values | dict(values)
        self.tokens = tokens
        self.step = max(self.step, step)

    def renew(self) -> bool:
        """Renew the lease now; False if the lease is lost."""
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
            except StoreOutageError:
                wait = min(0.5, self.seconds / 10)
            except ConfigError as error:
                self.failure = error
                return
            if self._ended.wait(wait):
                return

    def end(self) -> None:
        self._ended.set()
        self.join(self.seconds)
