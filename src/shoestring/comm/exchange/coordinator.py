"""Decides which gradients are exchanged together, and when (after HiPress's coordinator, Bai et al., SOSP 2021).

A cohort is a set of parameters whose gradients are exchanged together. All parameters are divided into `parts` cohorts
of about the same number of bytes, in the usual order in which a backward pass computes gradients. All data that a
cohort sends in one stage are sent at once, so the number of collectives is parts x stages for any number of parameters
and DDP buckets. Cohorts do not depend on the buckets, because DDP rebuilds its buckets after the first step of every
launch.

Each of the n channels has its own process groups, and handles every n-th cohort from start to end. A single thread per
channel starts all of the channel's collectives. DDP calls its hook for the buckets in the same order on all ranks. So
all ranks complete cohorts and start collectives in the same order too, however fast a rank is. (Torch's PowerSGD hook
issues collectives from completion threads, in an order that depends on speed, and aborts on Gloo with several buckets.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import foreach_mul_
from shoestring.comm.codecs.codec import Codec, ExchangeContext, Grads
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import exhaust, naming_failures
from shoestring.comm.exchange.worker import Worker, WorkerTask
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.core.trace import span

After = Callable[[Exception | None], None]


@dataclass(eq=False)
class Cohort:
    """Gradients that are exchanged together, and callbacks to call once they are averaged."""

    names: Sequence[str]
    step: int = 0
    grads: Grads = field(default_factory=dict)
    after: list[After] = field(default_factory=list)
    averaged: bool | Tensor = False  # after the exchange: whether all ranks' gradients were finite
    keeps: bool = False  # whether to store the results of the last stage in `answers`
    answers: list[Tensor] = field(default_factory=list)

    def __str__(self) -> str:
        return f"the exchange of {join_names(self.names)} at step {self.step}"


class Channel:
    """Exchanges cohorts over one route, in the order of submission, on its own threads.

    While a second thread waits for the last collectives of a cohort and decodes their results, the first thread encodes
    the next cohort and starts its first collectives. The first thread starts all collectives, cohort by cohort and
    stage by stage, so their order is the same on all ranks, whether a rank overlaps two cohorts or not. At most two
    cohorts are in progress at a time, to limit memory.

    On an accelerator there is only one thread, which does not wait for the device. Without threads, the caller of
    `submit` runs the exchange itself: with one cohort per step there is nothing to overlap.
    """

    def __init__(
        self, route: Route, codec: Codec, device: torch.device, scale: Callable[[], float], *, threaded: bool
    ) -> None:
        self.route, self.codec, self.scale = route, codec, scale
        self.worker = Worker("shoestring-wire", device, threaded=threaded)
        overlaps = threaded and device.type == "cpu" and route.overlaps
        self.finisher = Worker("shoestring-decode", device) if overlaps else None
        self._slots = threading.Semaphore(2)  # limits the number of cohorts in progress

    def submit(self, cohort: Cohort) -> WorkerTask[None]:
        # A stage has at most two collectives (a small mean consists of two all-to-alls); a 2D torus adds one before and
        # one after.
        task = WorkerTask[None](str(cohort), (2 * self.codec.stages + 2) * self.route.timeout)
        exchange = self._exchange(cohort)
        if self.finisher is None:
            return self.worker.submit(task, partial(exhaust, exchange))
        self.worker.submit(WorkerTask[None](task.what, task.limit), partial(self._begin, exchange, task, self.finisher))
        return task

    def close(self) -> None:
        if self.worker.close() and (self.finisher is None or self.finisher.close()):
            self.route.close()

    def _begin(self, exchange: Generator[bool, None, None], task: WorkerTask[None], finisher: Worker) -> None:
        """Run an exchange until its last collectives have been started; `finisher` then waits for them and decodes."""
        self._slots.acquire()
        error, stages = None, 0
        try:
            for starts_more in exchange:
                stages += 1
                if stages == self.codec.stages and not starts_more:
                    break
        except Exception as caught:
            error = caught
        finisher.submit(task, partial(self._finish, exchange, error))

    def _finish(self, exchange: Generator[bool, None, None], error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            for _ in exchange:
                raise AssertionError(f"{type(self.codec).__name__} yields more often than its stages say")
        finally:
            self._slots.release()

    def _exchange(self, cohort: Cohort) -> Generator[bool, None, None]:
        """Exchange a cohort, and call its callbacks. An error is passed to the callbacks and raised. Yields as
        `Wire.stages` does."""
        error = None
        try:
            with naming_failures(str(cohort)):
                # Gradients are exchanged without the loss scale, because it may change while residuals are stored.
                scale, grads = self.scale(), list(cohort.grads.values())
                if scale != 1:
                    foreach_mul_(grads, 1 / scale)
                keep = partial(setattr, cohort, "answers") if cohort.keeps else None
                averaged = yield from self.route.stages(self.codec, cohort.grads, cohort.step, keep)
                if scale != 1:
                    foreach_mul_(grads, scale)
                cohort.averaged = averaged
        except Exception as caught:
            error = caught
        for work in cohort.after:
            work(error)
        if error is not None:
            raise error


class Coordinator:
    """Collects arriving gradients into cohorts and exchanges them, one round per step.

    Args:
        routes: one route for each channel.
        sizes: bytes of every parameter whose gradient arrives in each round, by name, in the order of a forward pass.
        parts: number of cohorts in a round.
        scale: function, called once per cohort, that returns the loss scale of arriving gradients; averages get the
            same scale.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        codec: Codec,
        sizes: dict[str, int],
        parts: int,
        device: torch.device,
        scale: Callable[[], float],
    ) -> None:
        self.codec, self.sizes, self.scale = codec, sizes, scale
        self.cohorts = deal_cohorts(sizes, parts)
        threaded = len(self.cohorts) > 1
        self.channels = [Channel(route, codec, device, scale, threaded=threaded) for route in routes]
        self.round = 0
        self.exposed = 0.0  # seconds that training has waited for the newest round
        self.keeps = False  # whether to store a round's last results, for replay, until the next round
        self._part = {name: part for part, names in enumerate(self.cohorts) for name in names}
        self._open: dict[int, Cohort] = {}
        self._running: list[WorkerTask[None]] = []
        self._newest: dict[int, Cohort] = {}
        self._submitted = 0

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def begin(self) -> None:
        """Begin a round; discard a previous round that an error in a backward pass left incomplete."""
        self._open.clear()
        self._running.clear()
        self._newest.clear()
        self._submitted = 0

    def arrive(self, grads: Grads, after: After) -> None:
        """Take gradients that have arrived; `after` is called on a channel's thread with None once all of them are
        averaged, or with an error if the exchange fails."""
        parts = {self._part[name] for name in grads}  # a bucket of DDP may belong to several cohorts
        once = _call_once_after(len(parts), after)
        for part in parts:
            cohort = self._open.setdefault(part, Cohort(self.cohorts[part], self.round, keeps=self.keeps))
            self._newest[part] = cohort
            cohort.after.append(once)
        for name, grad in grads.items():
            cohort = self._open[self._part[name]]
            cohort.grads[name] = grad
            if len(cohort.grads) < len(cohort.names):
                continue
            del self._open[self._part[name]]
            # The codec needs an order that is the same on all ranks, unlike the order of arrival.
            cohort.grads = {name: cohort.grads[name] for name in cohort.names}
            channel = self.channels[self._submitted % len(self.channels)]
            self._submitted += 1
            if self._submitted == len(self.cohorts):
                self._submitted = 0
                self.round += 1
            self._running.append(channel.submit(cohort))

    def wait(self) -> None:
        """Wait until all gradients that have arrived in this round are averaged.

        Raises:
            RuntimeError: from torch, if a rank is lost or late. PeerError: an exchange has not ended in time.
            ShoestringError: some gradients have not arrived, so their cohort cannot be exchanged.
        """
        missing = [name for cohort in self._open.values() for name in cohort.names if name not in cohort.grads]
        if missing:
            raise ShoestringError(f"no gradient of {join_names(missing)} has arrived in the backward pass")
        running, self._running = self._running, []
        began = time.perf_counter()
        with span("exposed", "wait"):
            for task in running:
                task.result()
        self.exposed = time.perf_counter() - began

    def exchange(self, grads: Grads) -> None:
        """Exchange all gradients of a round; returns when `grads` are averages. Raises the same errors as `wait`."""
        self.begin()
        self.arrive(grads, lambda _: None)
        self.wait()

    def return_to_residual(self, name: str, average: Tensor) -> None:
        """Add an average that was not applied to the model back to the residual, unless the average is not finite."""
        if self._newest[self._part[name]].averaged:
            self.codec.return_to_residual(name, self.channels[0].route.own(average / self.scale()))

    def answers(self) -> list[list[Tensor]] | None:
        """The results of each cohort's last stage, from which the averages of the newest round were decoded; None if a
        gradient was not finite."""
        newest = [self._newest[part] for part in range(len(self.cohorts)) if part in self._newest]
        whole = len(newest) == len(self.cohorts) and all(cohort.averaged for cohort in newest)
        return [cohort.answers for cohort in newest] if whole else None

    def decode(self, grads: Grads, answers: Sequence[Sequence[Tensor]]) -> None:
        """Decode the averages of a round from the results in `answers` into `grads`, and count the round as done."""
        for names, cohort_answers in zip(self.cohorts, answers, strict=True):
            context = ExchangeContext(0, self.channels[0].route.size, self.round)
            self.codec.decode_average({name: grads[name] for name in names}, cohort_answers, context)
        self.round += 1

    @property
    def sent(self) -> int:
        """Number of bytes that this rank has sent."""
        return sum(channel.route.sent for channel in self.channels)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "codec": self.codec.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.round = state_dict["round"]
        self.codec.load_state_dict(state_dict["codec"])

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """See `Codec.merge_states`."""
        return {"round": states[0]["round"], "codec": self.codec.merge_states([state["codec"] for state in states])}


def deal_cohorts(sizes: dict[str, int], parts: int) -> list[list[str]]:
    """Divide the names, in reverse order, into at most `parts` consecutive groups with about equal bytes."""
    runs: list[list[str]] = []
    passed, total = 0, sum(sizes.values())
    for name in reversed(sizes):
        if not runs or passed * parts >= len(runs) * total:
            runs.append([])
        runs[-1].append(name)
        passed += sizes[name]
    return runs


def join_names(names: Sequence[str]) -> str:
    """Format names for a message: one or two names in full; of more names, the number, the first and the last."""
    if len(names) < 3:
        return " and ".join(f"`{name}`" for name in names)
    return f"{len(names)} parameters (`{names[0]}` to `{names[-1]}`)"


def refuse_added(name: str, added: Sequence[str]) -> None:
    """Raise ConfigError if there are any parameters in `added`: they were not trained yet when the feature `name` was
    attached."""
    if added:
        raise ConfigError(
            f"{join_names(added)} was not trained when `{name}` was attached, and is now",
            hint=f"attach `{name}` afterwards",
        )


def _call_once_after(count: int, after: After) -> After:
    """Make a callback that expects `count` calls. The last call passes the first error that any call received, or None,
    to `after`."""
    errors: list[Exception | None] = []
    lock = threading.Lock()

    def once(error: Exception | None) -> None:
        with lock:
            errors.append(error)
            last = len(errors) == count
        if last:
            after(next((raised for raised in errors if raised is not None), None))

    return once
