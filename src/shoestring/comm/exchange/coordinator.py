"""Who exchanges what, and when: after HiPress's coordinator (Bai et al., SOSP 2021), on torch's collectives.

All parameters are dealt into `parts` cohorts of about equal size, in the order in which a backward pass usually brings
their gradients. All that a cohort sends in one stage travels at once, so the number of collectives is parts x stages,
whatever the numbers of parameters and of DDP's buckets are. Cohorts do not depend on the buckets, which DDP rebuilds
after the first step of every start.

Each channel is one thread with process groups of its own that takes every n-th cohort from start to end. Gradients
arrive in an order that is the same on all ranks, so cohorts fill up and collectives are issued in the same order too,
and never in one that depends on how fast a rank is. (Torch's PowerSGD hook issues from completion threads, where it
does, and aborts on Gloo with several buckets.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import foreach_mul_
from shoestring.comm.codecs.codec import Codec, Grads
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import naming
from shoestring.comm.exchange.worker import Task, Worker
from shoestring.core.errors import ShoestringError
from shoestring.core.trace import span

After = Callable[[Exception | None], None]


@dataclass(eq=False)
class Cohort:
    """Gradients that are exchanged together, and what to do once they are averages."""

    names: Sequence[str]
    step: int = 0
    grads: Grads = field(default_factory=dict)
    after: list[After] = field(default_factory=list)
    averaged: bool = False  # once exchanged: whether every rank's gradients were finite

    def __str__(self) -> str:
        return f"the exchange of {several(self.names)} at step {self.step}"


class Channel:
    """A thread that exchanges cohorts over one route, in the order in which it is given them.

    Without a thread, whoever submits a cohort exchanges it: where a step has one part, nothing could go on meanwhile.
    """

    def __init__(
        self, route: Route, codec: Codec, device: torch.device, scale: Callable[[], float], *, threaded: bool
    ) -> None:
        self.route, self.codec, self.scale = route, codec, scale
        self.worker = Worker("shoestring-wire", device, threaded=threaded)

    def submit(self, cohort: Cohort) -> Task[None]:
        # Each stage is at most a collective by owners, which is two; the torus adds one before and one after them.
        task = Task[None](str(cohort), (2 * self.codec.stages + 2) * self.route.timeout)
        return self.worker.submit(task, partial(self._run, cohort))

    def close(self) -> None:
        if self.worker.close():
            self.route.close()

    def _run(self, cohort: Cohort) -> None:
        """Exchange a cohort, and tell those who wait for it; whoever waits for the result raises the error there."""
        error = None
        try:
            with naming(str(cohort)):
                cohort.averaged = self._exchange(cohort)
        except Exception as caught:
            error = caught
        for work in cohort.after:
            work(error)
        if error is not None:
            raise error

    def _exchange(self, cohort: Cohort) -> bool:
        """Without the scale of the loss, which changes: what is left of a gradient for later steps keeps its size."""
        scale, grads = self.scale(), list(cohort.grads.values())
        if scale != 1:
            foreach_mul_(grads, 1 / scale)
        averaged = self.route.run(self.codec, cohort.grads, cohort.step)
        if scale != 1:
            foreach_mul_(grads, scale)
        return averaged


class Coordinator:
    """Turns gradients that arrive into exchanges, one round a step.

    Args:
        routes: where they travel, one for each channel.
        sizes: the bytes of every parameter that arrives in each round, by name, in the order of a forward pass.
        parts: cohorts of a round.
        scale: what gradients are multiplied by when they arrive, and averages must be; asked once a cohort.
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
        self.cohorts = dealt(sizes, parts)
        threaded = len(self.cohorts) > 1
        self.channels = [Channel(route, codec, device, scale, threaded=threaded) for route in routes]
        self.round = 0
        self.exposed = 0.0  # seconds of the newest round between its last arrival and its end
        self._part = {name: part for part, names in enumerate(self.cohorts) for name in names}
        self._open: dict[int, Cohort] = {}
        self._running: list[Task[None]] = []
        self._newest: dict[int, Cohort] = {}
        self._submitted = 0

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def begin(self) -> None:
        """A round begins; what is left of one that was broken off, by an error in a backward pass, is dropped."""
        self._open.clear()
        self._running.clear()
        self._newest.clear()
        self._submitted = 0

    def arrive(self, grads: Grads, after: After) -> None:
        """Take gradients; `after` is called on a channel's thread once all are averages, or with the error."""
        parts = {self._part[name] for name in grads}
        once = _last_of(len(parts), after)
        for part in parts:
            cohort = self._open.setdefault(part, Cohort(self.cohorts[part], self.round))
            self._newest[part] = cohort
            cohort.after.append(once)
        for name, grad in grads.items():
            cohort = self._open[self._part[name]]
            cohort.grads[name] = grad
            if len(cohort.grads) == len(cohort.names):
                self._submit(self._open.pop(self._part[name]))

    def wait(self) -> None:
        """Wait until all that has arrived in this round has been exchanged.

        Raises:
            RuntimeError: from torch, when a rank is lost or late. PeerError: an exchange has not ended in time.
            ShoestringError: some gradients have not arrived, so that those of their cohort cannot be exchanged.
        """
        missing = [name for cohort in self._open.values() for name in cohort.names if name not in cohort.grads]
        if missing:
            raise ShoestringError(f"no gradient of {several(missing)} has arrived in the backward pass")
        running, self._running = self._running, []
        with span("exposed", "wait"):
            for task in running:
                task.result()

    def exchange(self, grads: Grads) -> None:
        """A whole round at once; returns when `grads` are averages. Raises as `wait` does."""
        self.begin()
        self.arrive(grads, lambda _: None)
        self.wait()

    def _submit(self, cohort: Cohort) -> None:
        cohort.grads = {name: cohort.grads[name] for name in cohort.names}
        channel = self.channels[self._submitted % len(self.channels)]
        self._submitted += 1
        if self._submitted == len(self.cohorts):
            cohort.after.insert(0, self._ended(time.perf_counter()))
            self._submitted = 0
            self.round += 1
        self._running.append(channel.submit(cohort))

    def _ended(self, arrived: float) -> After:
        def after(_: Exception | None) -> None:
            self.exposed = time.perf_counter() - arrived

        return after

    def take_back(self, name: str, delivered: Tensor) -> None:
        """Owe again an average of this round that could not be used; one that is not finite took nothing from state."""
        if self._newest[self._part[name]].averaged:
            self.codec.take_back(name, self.channels[0].route.own(delivered / self.scale()))

    @property
    def sent(self) -> int:
        """Bytes that have left this rank."""
        return sum(channel.route.sent for channel in self.channels)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "codec": self.codec.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.round = state_dict["round"]
        self.codec.load_state_dict(state_dict["codec"])

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """See `Codec.merged`."""
        return {"round": states[0]["round"], "codec": self.codec.merged([state["codec"] for state in states])}


def dealt(sizes: dict[str, int], parts: int) -> list[list[str]]:
    """The names in reverse, in at most `parts` runs of about equal size."""
    runs: list[list[str]] = []
    seen, total = 0, sum(sizes.values())
    for name in reversed(sizes):
        if not runs or seen * parts >= len(runs) * total:
            runs.append([])
        runs[-1].append(name)
        seen += sizes[name]
    return runs


def several(names: Sequence[str]) -> str:
    """Names in a sentence: all of two, the first and the last of more."""
    if len(names) < 3:
        return " and ".join(f"`{name}`" for name in names)
    return f"{len(names)} parameters (`{names[0]}` to `{names[-1]}`)"


def _last_of(count: int, after: After) -> After:
    """Call `after` at the last of so many calls, with the first error of all of them."""
    errors: list[Exception | None] = []
    lock = threading.Lock()

    def once(error: Exception | None) -> None:
        with lock:
            errors.append(error)
            last = len(errors) == count
        if last:
            after(next((each for each in errors if each is not None), None))

    return once
