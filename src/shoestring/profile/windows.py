"""Recording a part of the time: one window in each block, what it says of the whole block, and the share for a budget.

Blocks are of optimizer steps once there are any, because only then are a forward pass and its backward pass in one
window, and of seconds before. Within its block a window begins at random, so that every operator is as likely to be
recorded as any other: stratified sampling with one sample a stratum. How far a window may be from its block is judged
by how far the windows of neighbouring blocks are from each other.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple, Protocol

import numpy as np

from shoestring.core.errors import ConfigError

WINDOW = 0.05
"""Seconds of a window before there are steps."""

FIRST_STEPS = 2
"""Steps that are recorded before windows are drawn."""

BLOCK = 0.05, 0.5
"""Least seconds of a block, at first and later, when they are a tenth of the time so far: reading the counters at its
end takes about a millisecond."""

UNSEEN = 2.5
"""What recording costs, over what it can measure of it itself, until steps with and without it have been compared:
torch's own work to call us, and caches that hold less of the program's."""
DOUBT = 1.0
"""Standard error of `UNSEEN`, as a part of it."""
COMPARED = 101
"""Newest comparisons of steps with and without recording that count."""

SHARES = 0.005, 0.9
"""Least and largest share under a budget: without anything left out, nothing can be compared."""


class Spent(NamedTuple):
    """Seconds since any fixed moment."""

    recording: float
    """That recording measures of itself."""
    processor: float
    """Of the program and everything here."""
    beside: float
    """Of the processor, for what goes on also where nothing is recorded."""

    def since(self, earlier: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self, earlier, strict=True)))


class Counters(Protocol):
    """A thread's tree: nodes and numbers as `collector.py` reads them."""

    numbers: np.ndarray
    means: np.ndarray


@dataclass
class Stratum:
    """The stratum that is being sampled, in steps or seconds."""

    begin: float
    end: float
    opens: float
    closes: float
    opened: float | None = None
    recorded: float = 0.0


@dataclass
class ThreadEstimate:
    """Of one thread, by node: count, inclusive, within, graphed, squares."""

    totals: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))
    variances: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """Of count, and of the time of a node itself."""
    rates: np.ndarray | None = None
    """Of the last window, a unit."""
    seen: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))
    """What the counters were at the end of the last window."""
    pending: float = 0.0
    """Sum of squared lengths of blocks whose variance the second window tells."""

    def add(self, counters: np.ndarray, recorded: float, length: float) -> None:
        """A window of `recorded` units, that stands for a block of `length`."""
        size = len(counters)
        for name in ("totals", "variances", "seen", "rates"):
            old = getattr(self, name)
            if old is not None and len(old) < size:
                setattr(self, name, np.concatenate([old, np.zeros((size - len(old), old.shape[1]))]))
        rates = (counters - self.seen) / recorded
        self.seen = counters
        self.totals += rates * length
        self.pending += max(length - recorded, 0.0) * length
        if self.rates is not None:
            difference = rates - self.rates
            ours = np.stack([difference[:, 0], difference[:, 1] - difference[:, 2]], axis=1)
            self.variances += self.pending * ours**2 / 2
            self.pending = 0.0
        self.rates = rates

    def extend(self, length: float) -> None:
        """Add a block of which nothing was recorded: it is taken to be as the last was."""
        if self.rates is not None:
            self.totals += self.rates * length
            self.pending += length * length

    def settled(self) -> np.ndarray:
        """The variances; of a single window nothing is known, and its standard error is all of it."""
        if self.pending and self.rates is not None:
            own = np.stack([self.rates[:, 0], self.rates[:, 1] - self.rates[:, 2]], axis=1)
            self.variances = self.variances + self.pending * own**2
            self.pending = 0.0
        return self.variances

    def change_unit(self) -> None:
        """What follows is of steps instead of seconds."""
        self.settled()
        self.rates = None


@dataclass
class Price:
    """What recording adds to the processor time of what is recorded, as a part of it.

    At first that is what recording measures of itself, times `UNSEEN`. Each block with steps of both kinds compares
    them; the median of the newest comparisons counts the more, the closer they are to each other.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))
    measured: float = 0.0
    """By recording itself."""

    def measure(self, window: Spent) -> None:
        """A window has ended."""
        if window.processor > window.recording:
            loss = window.recording / (window.processor - window.recording)
            self.measured += (loss - self.measured) / (4 if self.measured else 1)

    def compare(self, recorded: float, unrecorded: float) -> None:
        """Processor seconds of a step of each kind in one block."""
        if unrecorded > 0:
            self.ratios.append(recorded / unrecorded - 1)

    @property
    def loss(self) -> float:
        """The estimate, by the precision of both."""
        expected = UNSEEN * self.measured
        if len(self.ratios) < 3 or not expected:
            return expected
        middle = statistics.median(self.ratios)
        spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in self.ratios)
        ours, theirs = (DOUBT * expected) ** 2, max(1.2533**2 * spread**2 / len(self.ratios), 1e-8)
        return max((expected * theirs + middle * ours) / (ours + theirs), self.measured)


class Windows:
    """Opens and closes windows as steps and seconds go by.

    Args:
        read: gives the counters of all threads.
        pause: stops recording, or goes on with it.
        cost: what was spent so far.
        share: of the time that is recorded, of (0, 1].
        budget: what recording may add to the processor time of the program; sets the share, where given.

    Raises:
        ConfigError: a share or budget that is none.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Counters]],
        pause: Callable[[bool], object],
        cost: Callable[[], Spent],
        share: float,
        budget: float | None,
    ) -> None:
        if not 0 < share <= 1 or (budget is not None and not 0 < budget < 1):
            raise ConfigError(f"cannot record a share of {share} within a budget of {budget}", hint="choose (0, 1]")
        self.read, self.pause, self.cost, self.budget = read, pause, cost, budget
        self.share = share if budget is None else SHARES[1]
        self.threads: list[ThreadEstimate] = []
        self.random, self.lock = random.Random(0), threading.Lock()
        self.stepping, self.steps, self.now, self.step_seconds = False, 0, 0.0, 0.0
        self.recording, self.recorded = True, 0.0
        self.price, self.handling, self.handled = Price(), 0.0, 0.0
        self.opened_at = self.stepped_at = 0.0

    def begin(self) -> None:
        """Count from here: the first block is recorded as a whole."""
        self.threads = [ThreadEstimate(seen=_columns(each)) for each in self.read()]
        self.began = self.block_began = self.window_began = self.cost()
        self.window: Spent | None = None
        self.block = Stratum(0.0, WINDOW, 0.0, WINDOW, 0.0)

    def tick(self, seconds: float) -> None:
        """So many seconds have gone by since the beginning."""
        with self.lock:
            self.now = seconds
            if not self.stepping:
                self._advance(self._of_program())

    def step(self, seconds: float) -> None:
        """An optimizer step has ended."""
        began = time.perf_counter()
        with self.lock:
            if self.stepping:
                self.step_seconds += (seconds - self.stepped_at - self.step_seconds) / min(self.steps + 1, 20)
            self.now = self.stepped_at = seconds
            if not self.stepping:
                self._end(self._of_program())
                self.stepping = True
                for thread in self.threads:
                    thread.change_unit()
                self.block = Stratum(0, FIRST_STEPS, 0, FIRST_STEPS)
            else:
                self.steps += 1
            self._advance(self.steps)
        self.handling += time.perf_counter() - began

    def finish(self, seconds: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """End the last block; totals and variances of each thread."""
        with self.lock:
            self.now = seconds
            self._end(self.steps if self.stepping else self._of_program())
            return [(each.totals, each.settled()) for each in self.threads]

    def _of_program(self) -> float:
        """Seconds without what recording took: a window would seem longer by that than the rest of its block."""
        return self.now - self.cost().since(self.began).recording * UNSEEN

    def _advance(self, position: float) -> None:
        block = self.block
        if block.opened is None and block.recorded == 0 and block.opens <= position < block.end:
            self._open(position)
        if block.opened is not None and position >= block.closes:
            self._close(position)
        if position >= block.end:
            self._end(position)
            self._next(position)
            if position >= self.block.opens:
                self._open(position)

    def _open(self, position: float) -> None:
        self.block.opened, self.opened_at = position, self.now
        self.block.closes += position - self.block.opens
        self.window_began = self.cost()
        if not self.recording:
            self.pause(False)
            self.recording = True

    def _close(self, position: float) -> None:
        block = self.block
        assert block.opened is not None
        block.recorded, block.opened = max(position - block.opened, 1e-9), None
        self.recorded += self.now - self.opened_at
        self.window = self.cost().since(self.window_began)
        self.price.measure(self.window)
        if self.share < 1:
            self.pause(True)
            self.recording = False

    def _keep_budget(self, budget: float, length: float) -> None:
        """A block has ended of which so much was recorded."""
        whole, window, ours = self.cost().since(self.block_began), self.window, self.handling - self.handled
        rest = length - self.block.recorded
        if self.stepping and window is not None and rest > 0:
            outside = whole.processor - whole.beside - ours - (window.processor - window.beside)
            self.price.compare((window.processor - window.beside) / self.block.recorded, outside / rest)
        spent, loss = self.cost().since(self.began), max(self.price.loss, 1e-9)
        beside = (spent.beside + self.handling) / max(spent.processor, 1e-9)
        recorded = self.recorded / (1 + loss)  # seconds as the program alone would have taken
        missed = budget - beside - loss * recorded / max(self.now - self.recorded + recorded, 1e-9)
        wanted = budget - beside + min(max(missed, -budget / 2), budget / 2)
        self.share = min(max(wanted / loss, SHARES[0]), SHARES[1])

    def _end(self, position: float) -> None:
        """Reckon the block, of which there may be no window."""
        block = self.block
        if block.opened is not None and position > block.opened:
            self._close(position)
        length = position - block.begin
        if length <= 0:
            return
        if block.recorded:
            data = self.read()
            self.threads += [ThreadEstimate() for _ in range(len(data) - len(self.threads))]
            for thread, each in zip(self.threads, data, strict=True):
                thread.add(_columns(each), block.recorded, length)
        else:
            for thread in self.threads:
                thread.extend(length)
        if self.budget is not None:
            self._keep_budget(self.budget, length)
        self.block_began, self.window, self.handled = self.cost(), None, self.handling

    def _next(self, position: float) -> None:
        unit = 1 if self.stepping else WINDOW
        seconds = min(max(BLOCK[0], self.now / 10), BLOCK[1])
        each = (self.step_seconds or seconds) if self.stepping else WINDOW
        window = length = ceil(seconds / each)
        if self.share < 1:  # of both kinds one at least
            window = max(1, round(self.share * max(length, 1 / self.share, 1 / (1 - self.share))))
            length = max(round(window / self.share), window + 1)
        most = ceil(max(self.now, BLOCK[1]) / each)
        if self.budget is not None and length > most:
            # What the beginning cost would take a block this long to save: save first, and then look again.
            self.block = Stratum(position, position + most * unit, inf, inf)
            return
        opens = position + unit * (self.random.randrange(length - window + 1))
        self.block = Stratum(position, position + length * unit, opens, opens + window * unit)


def _columns(data: Counters) -> np.ndarray:
    columns = [data.numbers[:, 0], data.numbers[:, 1], data.numbers[:, 2], data.numbers[:, 5], data.means[:, 0]]
    return np.stack(columns, axis=1).astype(np.float64)
