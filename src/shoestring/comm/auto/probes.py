"""Measures the time of collectives and codecs on this cluster, and how much they slow down computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import all_gather_single
from shoestring.comm.codecs.codec import CodecFactory, Coding, ExchangeContext, advance
from shoestring.comm.codecs.lockstep import run_alone
from shoestring.comm.exchange.wire import all_finite
from shoestring.core.world import World
from shoestring.planning.cluster import Collective

SMALLEST, GROWTH = 1 << 10, 4  # bytes of the smallest message, and the growth factor
PATIENCE = 0.3  # if a collective takes this many seconds, larger messages are not measured


def time_collectives(world: World, over: Sequence[str], largest: int = 1 << 24) -> tuple[Collective, ...]:
    """Measure latency and bandwidth of each kind of collective along the mesh axes `over`. Every rank must call this.

    Messages have up to `largest` bytes. A message is what each rank contributes: the whole tensor in an all-reduce or
    all-to-all, the rank's own shard in an all-gather. The result is empty if there is one rank along `over`.
    """
    group = world.group(over)
    if group is None:
        return ()
    size = group.size()
    kinds = {
        "all-reduce": lambda sent: dist.all_reduce(sent, group=group),
        "all-gather": lambda sent: all_gather_single(sent.new_empty(size * len(sent)), sent, group=group),
        "all-to-all": lambda sent: dist.all_to_all_single(torch.empty_like(sent), sent, group=group),
    }
    collectives = []
    for kind, work in kinds.items():
        sizes, seconds = _time_messages(world, work, largest)
        latency, per_byte = fit_line(sizes, seconds)
        collectives.append(Collective(kind=kind, over=tuple(over), ranks=size, latency=latency, bandwidth=1 / per_byte))
    return tuple(collectives)


def _time_messages(world: World, work: Callable[[Tensor], object], largest: int) -> tuple[list[float], list[float]]:
    """Time `work` on messages of growing size; returns the bytes and the slowest rank's seconds of each message."""
    sizes: list[float] = []
    seconds: list[float] = []
    nbytes, ranks = SMALLEST, world.size
    while nbytes <= largest and (not seconds or seconds[-1] < PATIENCE):
        message = torch.zeros(nbytes // 4 // ranks * ranks or ranks, device=world.device)
        repeats = 3 if seconds and seconds[-1] > PATIENCE / GROWTH / 4 else 7
        own = _median_seconds(partial(work, message), world.device, repeats)
        slowest = torch.tensor(own, dtype=torch.float64, device=world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks must stop at the same size
        seconds.append(float(slowest))
        sizes.append(message.nbytes)
        nbytes *= GROWTH
    return sizes, seconds


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `work` after one warm-up run, which also uses up the burst that a traffic shaper or a switch
    allows."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = a + b * size with a, b >= 0 by least squares of the relative errors; returns (a, b).

    Errors are relative so that no size dominates the fit.

    Raises:
        ValueError: there are no measurements.
    """
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if not len(n):
        raise ValueError("nothing was measured")
    rows = np.stack([1 / t, n / t], axis=1)
    if len(n) > 1:
        a, b = np.linalg.lstsq(rows, np.ones(len(n)), rcond=None)[0]
        if a >= 0 and b > 0:
            return float(a), float(b)
        if b <= 0:
            return float(1 / (1 / t).mean()), 1e-15
    return 0.0, float((n / t).sum() / ((n / t) ** 2).sum())


# -- codecs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecTiming:
    """Time and traffic of a codec on this rank, for one exchange of some gradients.

    `nbytes` has one entry per round of requests: the bytes by kind of collective. `seconds` has the times of
    computation before, between and after the rounds, one entry more than `nbytes`.
    """

    seconds: tuple[float, ...]
    nbytes: tuple[dict[str, int], ...]


def time_codec(
    make: CodecFactory, grads: Mapping[str, Tensor], context: ExchangeContext, repeats: int = 4
) -> CodecTiming:
    """Time the codec's own computation on copies of `grads`: the median of `repeats` exchanges after one warm-up.

    No network is used: answers are made as if all ranks had sent the same data. Codecs may alternate between two kinds
    of steps, so the bytes are the mean of two steps, and an even number of repeats has as many steps of each kind.
    """
    codec, device = make(), next(iter(grads.values())).device
    times: list[list[float]] = []
    sent: list[list[dict[str, int]]] = []
    for step in range(context.step, context.step + repeats + 1):
        copies = {name: grad.clone() for name, grad in grads.items()}
        seconds: list[float] = []
        with torch.no_grad():
            coding = codec.code(copies, ExchangeContext(context.rank, context.size, step))
            sent.append(run_alone(_timed(coding, device, seconds), context.size).stages)
        times.append(seconds)
    nbytes = [{kind: (even[kind] + odd[kind]) // 2 for kind in even} for even, odd in zip(*sent[-2:], strict=True)]
    return CodecTiming(tuple(np.median(times[1:], axis=0).tolist()), tuple(nbytes))


def _timed(coding: Coding, device: torch.device, seconds: list[float]) -> Coding:
    """Wrap a codec's generator: the time that it computes before, between and after requests is appended to
    `seconds`."""
    answers = None
    while True:
        synchronize(device)
        began = time.perf_counter()
        if len(seconds) == 1 and answers is not None:
            all_finite(answers)  # `Wire.run` does this with the first answers
        requests = advance(coding, answers)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        if requests is None:
            return
        answers = yield requests


# -- work that runs at the same time ----------------------------------------------------------------------------------


def measure_slowdown(
    one: Callable[[], object], other: Callable[[int], object], alone: tuple[float, float]
) -> dict[str, float]:
    """Measure how much `one` and `other` slow each other down on this rank.

    Args:
        other: function that does its work n times for an argument n; it runs on a separate thread.
        alone: seconds of `one`, and of one repetition of `other`, when nothing else runs.

    Returns:
        {"one": factor, "other": factor}; factors are at least 1.
    """
    times = max(1, round(1.5 * alone[0] / alone[1]))  # so that `other` outlasts `one`
    ended: list[float] = []

    def run_other() -> None:
        other(times)
        ended.append(time.perf_counter())

    thread = threading.Thread(target=run_other)
    began = time.perf_counter()
    thread.start()
    one()
    together = time.perf_counter() - began
    thread.join()
    return solve_slowdown(alone[0], alone[1] * times, together, ended[0] - began)


def solve_slowdown(one: float, other: float, one_beside: float, other_beside: float) -> dict[str, float]:
    """Compute the slowdown factors of two kinds of work from their times alone and side by side.

    Both kinds of work begin at the same time and slow down while both run. After the shorter one ends, the rest of the
    longer one runs at full speed.
    """
    both = min(one_beside, other_beside)
    shares = {"one": (one, one_beside), "other": (other, other_beside)}
    return {
        name: max(1.0, both / done) if (done := alone - (beside - both)) > 0 else max(1.0, beside / alone)
        for name, (alone, beside) in shares.items()
    }
