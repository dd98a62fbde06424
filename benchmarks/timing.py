"""Timing two things against each other on a machine that is not quiet."""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.calm import was_calm
from benchmarks.rows import Measured
from shoestring.core.errors import ConfigError, WorldError

Clock = Callable[[], float]  # seconds; time.perf_counter, time.process_time or commands_cpu_time
Order = Literal["ABBA", "AB"]

FEWEST_ROUNDS = 6  # with fewer, no interval between two of the ratios covers the median 95% of the time
_GRACE = 10.0  # seconds between asking a command to end and killing it


@dataclass(frozen=True)
class Paired:
    """Time of `a` over time of `b`, one ratio a round; above 1, `b` is the faster one.

    `a_seconds` and `b_seconds` are the medians over all samples of each, for orientation only.
    """

    ratios: tuple[float, ...]
    a_seconds: float
    b_seconds: float

    @property
    def median(self) -> float:
        """The median in the logarithm, so that swapping `a` and `b` gives exactly the inverse."""
        return math.exp(statistics.median(map(math.log, self.ratios)))

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the ratios."""
        first, _, third = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return first, third

    @property
    def interval(self) -> tuple[float, float]:
        """A confidence interval of the median ratio, at 95% or the next level above that the rounds allow.

        Its ends are two of the sorted ratios: the one at rank k from below and the one at rank k from above, where k
        is the largest rank with P(Binomial(n, 1/2) < k) <= 2.5% (the sign test, inverted; Conover, Practical
        Nonparametric Statistics, 3.2). It asks of the ratios only that they are independent: timings have heavy
        right tails, which widen a t interval of log ratios and leave it beside the median. It is what the bootstrap
        of the median tends to, but keeps its level with a handful of rounds, where the bootstrap's interval is too
        narrow, and it draws no random numbers, so that the same ratios always give the same interval.
        """
        ordered = sorted(self.ratios)
        rank = sign_test_rank(len(ordered))
        return ordered[rank - 1], ordered[-rank]

    def measured(self, note: str = "") -> Measured:
        """The median as a bar's value, with its interval; the ratios are described unless a note does."""
        return Measured(self.median, note or str(self), self.interval)

    def __str__(self) -> str:
        (low, high), (first, third) = self.interval, self.spread
        return (
            f"median of {len(self.ratios)} paired ratios, 95% interval {low:.4g} to {high:.4g}, "
            f"quartiles {first:.4g} and {third:.4g}, {self.a_seconds:.3g} s over {self.b_seconds:.3g} s"
        )


def paired(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    rounds: int = 12,
    warmup: int = 2,
    order: Order = "ABBA",
    clock: Clock = time.perf_counter,
) -> Paired:
    """Time `a` against `b` in alternation and give the ratio of each round.

    A round runs A B B A, the next B A A B, and so on: a machine that slows down at a steady rate slows both alike
    within each round, and each follows itself as often as it follows the other. Its ratio is the geometric mean of
    its `a` times over that of its `b` times. `order="AB"` halves the runs where they are dear (A B, then B A): a
    drift then shows as spread, and the median stays free of it. Garbage is collected before each round and not
    within one. GPU work must be waited for inside `a` and `b`. A round that other work disturbed is made again.

    Args:
        a: what the ratio has above the line; for a speed-up, the baseline.
        b: what it has below; for a speed-up, ours.
        rounds: how many ratios, 6 at least.
        warmup: how often each runs untimed before that.
        order: of the runs within a round.
        clock: seconds of any kind, such as `time.perf_counter` or `time.process_time` (CPU time of all threads).

    Raises:
        ConfigError: too few rounds, or something so short that the clock did not move.
        BusyMachineError: the machine is never calm for a whole round.
    """
    if rounds < FEWEST_ROUNDS:
        raise ConfigError(f"{rounds} rounds give no 95% interval", hint=f"ask for {FEWEST_ROUNDS} or more")
    for _ in range(warmup):
        a()
        b()
    works = {"A": a, "B": b}
    history: list[list[tuple[str, float]]] = []
    with _no_garbage_collection():
        was_calm()  # what lies between the warm-up and the first round does not count
        while len(history) < rounds:
            gc.collect()
            turns = order if len(history) % 2 == 0 else order.translate(str.maketrans("AB", "BA"))
            seconds = [(turn, _seconds(works[turn], clock)) for turn in turns]
            if was_calm():
                history.append(seconds)
    medians = {side: statistics.median(_side(side, [run for one in history for run in one])) for side in "AB"}
    return Paired(tuple(map(_ratio, history)), medians["A"], medians["B"])


def paired_commands(
    a: Sequence[str],
    b: Sequence[str],
    *,
    rounds: int = FEWEST_ROUNDS,
    warmup: int = 1,
    order: Order = "AB",
    clock: Clock = time.perf_counter,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Paired:
    """`paired` for two whole commands, start and end included; `clock=commands_cpu_time` counts their CPU time.

    Raises:
        ConfigError: as for `paired`.
        WorldError: a command failed; the message ends with the last line it wrote to stderr.
    """
    run = partial(run_command, cwd=cwd, env=env)
    return paired(partial(run, a), partial(run, b), rounds=rounds, warmup=warmup, order=order, clock=clock)


def run_command(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run `command` to its end and return its stdout; when left by an exception, end all that it started."""
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate()
    except BaseException:
        _end_group(process)
        raise
    if process.returncode:
        last = (err.strip().splitlines() or ["nothing on stderr"])[-1]
        raise WorldError(f"`{' '.join(command)}` exited with {process.returncode}: {last}")
    return out


def gpu_seconds(work: Callable[[], object], calls: int = 1) -> float:
    """Mean seconds of a call on the GPU, by its own clock."""
    import torch

    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(calls):
        work()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3 / calls


def commands_cpu_time() -> float:
    """CPU seconds, user and system, of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # on the first, an elastic agent ends its workers
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE)


def _seconds(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return clock() - start


def _ratio(times: Sequence[tuple[str, float]]) -> float:
    if min(seconds for _, seconds in times) <= 0:
        raise ConfigError("a sample took no time on this clock", hint="repeat the work inside the function")
    above, below = (statistics.fmean(map(math.log, _side(side, times))) for side in "AB")
    return math.exp(above - below)


def _side(side: str, times: Sequence[tuple[str, float]]) -> list[float]:
    return [seconds for turn, seconds in times if turn == side]


def sign_test_rank(count: int) -> int:
    """Rank, from either end of the sorted values, of the ends of the median's 95% interval; 0 for too few values."""
    below, rank = 0, 0
    while 40 * (below + math.comb(count, rank)) <= 2**count:  # 2.5% each side, in whole numbers
        below += math.comb(count, rank)
        rank += 1
    return rank


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within, garbage is collected on request alone, and among the objects made within alone."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()  # a full collection takes 0.1 s once torch is imported
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
