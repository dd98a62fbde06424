"""Who exchanges what, and when: after HiPress's coordinator (Bai et al., SOSP 2021), on torch's collectives.

Gradients arrive in an order that is the same on every rank, in buckets or one by one. Consecutive ones form `parts`
cohorts of about equal size; all that a cohort sends in one stage travels at once, so the number of collectives is
parts x stages, whatever the numbers of parameters and buckets are. Each channel is one thread with a process group of
its own that takes every n-th cohort from start to end. So the order of collectives on a group follows from the order
of arrival alone, and never from how fast a rank is: torch's PowerSGD hook issues from completion threads, where it
does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from shoestring.comm.codec import Codec, Grads
from shoestring.comm.route import Route
from shoestring.core.trace import span


@dataclass(eq=False)
class Cohort:
    """Gradients that are exchanged together, and what to do once they are averages."""

    grads: Grads = field(default_factory=dict)
    after: list[Callable[[Exception | None], None]] = field(default_factory=list)
    ready: torch.Event | None = None
    step: int = 0


class Channel:
    """A thread that exchanges cohorts over one route, in the order in which it is given them."""

    def __init__(self, route: Route, codec: Codec, device: torch.device) -> None:
        self.route, self.codec, self.device = route, codec, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[Cohort | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shoestring-wire", daemon=True)
        self._thread.start()

    def submit(self, cohort: Cohort) -> None:
        if self.stream is not None:
            cohort.ready = torch.cuda.current_stream(self.device).record_event()
        self._queue.put(cohort)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self.route.close()

    def _work(self) -> None:
        while (cohort := self._queue.get()) is not None:
            with torch.no_grad(), torch.cuda.stream(self.stream) if self.stream else nullcontext():
                if cohort.ready is not None:
                    cohort.ready.wait()
                error = self._exchange(cohort)
                for work in cohort.after:
                    work(error)

    def _exchange(self, cohort: Cohort) -> Exception | None:
        try:
            self.route.run(self.codec, cohort.grads, cohort.step)
        except Exception as error:  # whoever waits for the result raises it there
            return error
        return None


class Coordinator:
    """Turns gradients that arrive into exchanges, one round a step.

    Args:
        routes: where they travel, one for each channel.
        names: of all parameters that arrive in each round, with their sizes in bytes.
        parts: cohorts of a round; fewer where a bucket holds more than its part.
    """

    def __init__(
        self, routes: Sequence[Route], codec: Codec, names: dict[str, int], parts: int, device: torch.device
    ) -> None:
        self.codec, self.parts = codec, parts
        self.total = sum(names.values())
        self.sizes = names
        self.round = 0
        self.channels = [Channel(route, codec, device) for route in routes]
        self.exposed = 0.0  # seconds of the newest round between its last arrival and its end
        self._open = Cohort()
        self._arrived = self._cohorts = 0

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def arrive(self, grads: Grads, after: Callable[[Exception | None], None], *, last: bool) -> None:
        """Take gradients; `after` is called on a channel's thread once they are averages, or with the error.

        Args:
            last: nothing more arrives in this round.
        """
        self._open.grads |= grads
        self._open.after.append(after)
        self._arrived += sum(self.sizes[name] for name in grads)
        if last:
            self._open.after.append(self._ended(time.perf_counter()))
        if last or self._arrived * self.parts >= (self._cohorts + 1) * self.total:
            self._submit(last)

    def exchange(self, grads: Grads) -> None:
        """A whole round at once; returns when `grads` are averages.

        Raises:
            RuntimeError: from torch, when a rank is lost or late.
        """
        names, done = list(grads), []
        for index, name in enumerate(names):
            future: Future[None] = Future()
            done.append(future)
            self.arrive({name: grads[name]}, _settled(future), last=index == len(names) - 1)
        with span("exposed", "wait"):
            for future in done:
                future.result()

    def take_back(self, name: str, delivered: Tensor) -> None:
        """Owe again an average that could not be used."""
        self.codec.take_back(name, self.channels[0].route.own(delivered))

    def _submit(self, last: bool) -> None:
        cohort, self._open = self._open, Cohort()
        cohort.step = self.round
        self.channels[self._cohorts % len(self.channels)].submit(cohort)
        self._cohorts += 1
        if last:
            self.round += 1
            self._arrived = self._cohorts = 0

    def _ended(self, arrived: float) -> Callable[[Exception | None], None]:
        def after(_: Exception | None) -> None:
            self.exposed = time.perf_counter() - arrived

        return after

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


def _settled(future: Future[None]) -> Callable[[Exception | None], None]:
    def after(error: Exception | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return after
