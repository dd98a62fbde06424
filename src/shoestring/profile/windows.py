"""Samples a program in time: records one window in each block, scales the times up, and adjusts the share to a budget.

The length of a block is in seconds before the first optimizer step; afterwards it is in steps, so that a window
contains whole steps with forward and backward pass. A window begins at a random position in its block, so that every
operator is equally likely to be recorded; this is stratified sampling with one sample per stratum. The variance within
a block is estimated from the difference between the windows of adjacent blocks.
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
"""Length of windows before the first optimizer step, in seconds."""

FIRST_STEPS = 2
"""Number of first steps, all of which are recorded."""

BLOCK = 0.05, 0.5
"""Bounds, in seconds, of the minimum length of a block. Within the bounds, the minimum length is a tenth of the elapsed
time. Blocks must not be too short, because reading the counters at the end of a block takes about a millisecond."""

UNSEEN = 2.5
"""Prior estimate of the ratio of the whole cost of recording to the cost that the recorder measures itself. The
recorder cannot measure torch's work to call it, nor cache misses. The prior gets less weight with every comparison of
steps with and without recording."""
DOUBT = 1.0
"""Relative standard error of `UNSEEN`."""
COMPARED = 101
"""Number of most recent comparisons (of steps with and without recording) that are used."""

SHARES = 0.005, 0.9
"""Minimum and maximum share of recorded steps if a budget is set; some steps stay unrecorded, for comparison."""


class Spent(NamedTuple):
    """Seconds spent since a fixed starting point."""

    recording: float
    """Time that recording took, as measured by the recorder itself."""
    processor: float
    """Processor time of the program and of profiling."""
    beside: float
    """Processor time of the parts of profiling that continue while recording is paused."""

    def since(self, earlier: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self, earlier, strict=True)))


class Counters(Protocol):
    """The counters of a thread's tree, as in `native_tree.ThreadData`."""

    numbers: np.ndarray
    means: np.ndarray


@dataclass
class Stratum:
    """A block and its window; positions are in steps or seconds."""

    begin: float
    end: float
    opens: float
    closes: float
    opened: float | None = None
    recorded: float = 0.0


@dataclass
class ThreadEstimate:
    """Estimates for one thread; rows are nodes, and columns are count, inclusive, within, graphed, squares."""

    totals: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))
    variances: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """(N, 2): variances of count and own time."""
    rates: np.ndarray | None = None
    """Values per unit (step or second) in the last window; None before the first window in the current unit."""
    seen: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))
    """Counters at the end of the last window."""
    pending: float = 0.0
    """Sum of (length × unrecorded length) over the blocks whose variance only the next window can show."""

    def add(self, counters: np.ndarray, recorded: float, length: float) -> None:
        """Add the counters at the end of a window of `recorded` units, which represents a block of `length` units."""
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
            count_and_own = np.stack([difference[:, 0], difference[:, 1] - difference[:, 2]], axis=1)
            # half the squared difference of two independent samples estimates the variance of one sample
            self.variances += self.pending * count_and_own**2 / 2
            self.pending = 0.0
        self.rates = rates

    def extend(self, length: float) -> None:
        """Add a block without a window, assuming the same values per unit as in the last window."""
        if self.rates is not None:
            self.totals += self.rates * length
            self.pending += length * length

    def settled(self) -> np.ndarray:
        """Return the variances; after a single window, the standard error is assumed to be as large as the estimate."""
        if self.pending and self.rates is not None:
            own = np.stack([self.rates[:, 0], self.rates[:, 1] - self.rates[:, 2]], axis=1)
            self.variances = self.variances + self.pending * own**2
            self.pending = 0.0
        return self.variances

    def change_unit(self) -> None:
        """Switch the unit of lengths from seconds to steps."""
        self.settled()
        self.rates = None


@dataclass
class Price:
    """Estimates the overhead of recording, as a fraction of the processor time of the recorded work.

    The prior is `UNSEEN` times the cost that the recorder measures itself. Every block with recorded and unrecorded
    steps adds a comparison of the two; the less the most recent comparisons vary, the more weight their median gets.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))
    measured: float = 0.0
    """Overhead measured by the recorder itself, as a fraction, smoothed over windows."""

    def measure(self, window: Spent) -> None:
        """Add the time that the recorder itself measured in a finished window."""
        if window.processor > window.recording:
            loss = window.recording / (window.processor - window.recording)
            self.measured += (loss - self.measured) / (4 if self.measured else 1)

    def compare(self, recorded: float, unrecorded: float) -> None:
        """Add a comparison: processor seconds per recorded step and per unrecorded step of a block."""
        if unrecorded > 0:
            self.ratios.append(recorded / unrecorded - 1)

    @property
    def loss(self) -> float:
        """The estimated overhead: the mean of prior and median, weighted by their precision."""
        expected = UNSEEN * self.measured
        if len(self.ratios) < 3 or not expected:
            return expected
        middle = statistics.median(self.ratios)
        # 1.4826 times the median absolute deviation estimates the standard deviation of a normal distribution, and the
        # standard error of a median is 1.2533 times the standard error of a mean
        spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in self.ratios)
        prior_variance, variance = (DOUBT * expected) ** 2, max(1.2533**2 * spread**2 / len(self.ratios), 1e-8)
        mean = (expected * variance + middle * prior_variance) / (prior_variance + variance)
        return max(mean, self.measured)


class Windows:
    """Opens and closes windows of recording as the program's steps and time advance.

    Args:
        read: function that returns the counters of all threads.
        pause: function that pauses recording (True) or resumes it (False).
        cost: function that returns the time spent so far.
        share: fraction of the time to record, in (0, 1].
        budget: fraction of the program's processor time that recording may add; if not None, it sets the share.

    Raises:
        ConfigError: the share or budget is invalid.
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
            raise ConfigError(
                f"cannot record a share of {share} within a budget of {budget}",
                hint="use a share in (0, 1] and a budget in (0, 1)",
            )
        self.read, self.pause, self.cost, self.budget = read, pause, cost, budget
        self.share = share if budget is None else SHARES[1]
        self.threads: list[ThreadEstimate] = []
        self.random, self.lock = random.Random(0), threading.Lock()
        self.stepping, self.steps, self.now, self.step_seconds = False, 0, 0.0, 0.0
        self.recording, self.recorded = True, 0.0
        self.price, self.handling, self.handled = Price(), 0.0, 0.0
        self.opened_at = self.stepped_at = 0.0

    def begin(self) -> None:
        """Start the first block, which is recorded entirely."""
        self.threads = [ThreadEstimate(seen=_columns(counters)) for counters in self.read()]
        self.began = self.block_began = self.window_began = self.cost()
        self.window: Spent | None = None
        self.block = Stratum(0.0, WINDOW, 0.0, WINDOW, 0.0)

    def tick(self, seconds: float) -> None:
        """Advance to `seconds` seconds after the start; called at regular intervals."""
        with self.lock:
            self.now = seconds
            if not self.stepping:
                self._advance(self._of_program())

    def step(self, seconds: float) -> None:
        """Advance past the end of an optimizer step, which is `seconds` seconds after the start."""
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
        """End the last block; return (totals, variances) of each thread."""
        with self.lock:
            self.now = seconds
            self._end(self.steps if self.stepping else self._of_program())
            return [(thread.totals, thread.settled()) for thread in self.threads]

    def _of_program(self) -> float:
        """Seconds since the start, without the cost of recording, which would make recorded work seem slower."""
        return self.now - self.cost().since(self.began).recording * UNSEEN

    def _advance(self, position: float) -> None:
        block = self.block
        if block.opened is None and block.recorded == 0 and block.opens <= position < block.end:
            self._open(position)
        if block.opened is not None and position >= block.closes:
            self._close(position)
        if position >= block.end:
            self._end(position)
            self.block = self._next_block(position)
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
        """Set the share for the next block, after a block of `length` units."""
        whole, window, own = self.cost().since(self.block_began), self.window, self.handling - self.handled
        rest = length - self.block.recorded
        if self.stepping and window is not None and rest > 0:
            outside = whole.processor - whole.beside - own - (window.processor - window.beside)
            self.price.compare((window.processor - window.beside) / self.block.recorded, outside / rest)
        spent, loss = self.cost().since(self.began), max(self.price.loss, 1e-9)
        beside = (spent.beside + self.handling) / max(spent.processor, 1e-9)
        recorded = self.recorded / (1 + loss)  # seconds that the recorded work would have taken without recording
        missed = budget - beside - loss * recorded / max(self.now - self.recorded + recorded, 1e-9)
        # correct for cost above or below the budget so far, by at most half of the budget
        wanted = budget - beside + min(max(missed, -budget / 2), budget / 2)
        self.share = min(max(wanted / loss, SHARES[0]), SHARES[1])

    def _end(self, position: float) -> None:
        """End the block and add its estimates; the block may have had no window."""
        block = self.block
        if block.opened is not None and position > block.opened:
            self._close(position)
        length = position - block.begin
        if length <= 0:
            return
        if block.recorded:
            data = self.read()
            self.threads += [ThreadEstimate() for _ in range(len(data) - len(self.threads))]
            for thread, counters in zip(self.threads, data, strict=True):
                thread.add(_columns(counters), block.recorded, length)
        else:
            for thread in self.threads:
                thread.extend(length)
        if self.budget is not None:
            self._keep_budget(self.budget, length)
        self.block_began, self.window, self.handled = self.cost(), None, self.handling

    def _next_block(self, position: float) -> Stratum:
        unit = 1 if self.stepping else WINDOW
        seconds = min(max(BLOCK[0], self.now / 10), BLOCK[1])
        unit_seconds = (self.step_seconds or seconds) if self.stepping else WINDOW
        window = length = ceil(seconds / unit_seconds)
        if self.share < 1:  # at least one recorded and one unrecorded unit, so that they can be compared
            window = max(1, round(self.share * max(length, 1 / self.share, 1 / (1 - self.share))))
            length = max(round(window / self.share), window + 1)
        most = ceil(max(self.now, BLOCK[1]) / unit_seconds)
        if self.budget is not None and length > most:
            # the first windows exceeded the budget: record nothing for a while, then plan a block again
            return Stratum(position, position + most * unit, inf, inf)
        opens = position + unit * (self.random.randrange(length - window + 1))
        return Stratum(position, position + length * unit, opens, opens + window * unit)


def _columns(data: Counters) -> np.ndarray:
    """Extract the columns of `ThreadEstimate` from a thread's counters."""
    columns = [data.numbers[:, 0], data.numbers[:, 1], data.numbers[:, 2], data.numbers[:, 5], data.means[:, 0]]
    return np.stack(columns, axis=1).astype(np.float64)
