"""Measures what exchanges cost here: collectives, codecs, and how much both slow down computing."""

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

SMALLEST, GROWTH = 1 << 10, 4  # bytes of the first message, and the factor by which messages grow
PATIENCE = 0.3  # seconds of one collective after which no larger one is measured


def time_collectives(world: World, over: Sequence[str], largest: int = 1 << 24) -> tuple[Collective, ...]:
    """Fit latency and bandwidth of each kind of collective along the mesh axes `over`; every rank calls it.

    Messages have up to `largest` bytes, counted as each rank contributes them: the whole tensor of an all-reduce or an
    all-to-all, the rank's own shard of an all-gather. Empty where this rank is alone along `over`.
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
    """(bytes, seconds) of `work` on messages of growing size; the seconds are the slowest rank's."""
    sizes: list[float] = []
    seconds: list[float] = []
    nbytes, ranks = SMALLEST, world.size
    while nbytes <= largest and (not seconds or seconds[-1] < PATIENCE):
        message = torch.zeros(nbytes // 4 // ranks * ranks or ranks, device=world.device)
        repeats = 3 if seconds and seconds[-1] > PATIENCE / GROWTH / 4 else 7
        seconds.append(_slowest(world, _median_seconds(partial(work, message), world.device, repeats)))
        sizes.append(message.nbytes)
        nbytes *= GROWTH
    return sizes, seconds


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median after one warm-up run, which also uses up the burst that a traffic shaper or a switch lets pass."""
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


def _slowest(world: World, seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit (a, b) of seconds = a + b * size, neither negative, by least squares of the relative errors.

    Relative errors, so that no size dominates the fit.

    Raises:
        ValueError: there is nothing to fit.
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
    """One exchange of some gradients on this rank.

    `seconds` are those of computing before, between and after the requests; `nbytes` are the bytes of each request by
    collective. There is one more entry in `seconds` than in `nbytes`.
    """

    seconds: tuple[float, ...]
    nbytes: tuple[dict[str, int], ...]


def time_codec(
    make: CodecFactory, grads: Mapping[str, Tensor], context: ExchangeContext, repeats: int = 4
) -> CodecTiming:
    """Time the codec's own work on copies of `grads`: the median of `repeats` exchanges after one warm-up.

    There is no network: every answer is as if all ranks had sent the same. The bytes are the mean of two steps, and an
    even number of repeats has as many of one kind as of the other, for codecs that alternate.
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
    nbytes = [{kind: (one[kind] + other[kind]) // 2 for kind in one} for one, other in zip(*sent[-2:], strict=True)]
    return CodecTiming(tuple(np.median(times[1:], axis=0).tolist()), tuple(nbytes))


def _timed(coding: Coding, device: torch.device, seconds: list[float]) -> Coding:
    """The same generator, whose computing before, between and after its requests is appended to `seconds`."""
    answers = None
    while True:
        synchronize(device)
        began = time.perf_counter()
        if len(seconds) == 1 and answers is not None:
            all_finite(answers)  # as `Wire.run` does with the first answers
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
        other: does its work as many times as its argument says, on a thread of its own.
        alone: seconds of `one`, and of `other` once, when nothing else runs.

    Returns:
        {"one": factor, "other": factor}, neither below 1.
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
    """Solve for both slowdown factors from the seconds of two kinds of work alone and side by side.

    Both begin at the same time. While both run, each does its share of the work; the rest of the longer one is done at
    its own speed.
    """
    both = min(one_beside, other_beside)
    shares = {"one": (one, one_beside), "other": (other, other_beside)}
    return {
        name: max(1.0, both / done) if (done := alone - (beside - both)) > 0 else max(1.0, beside / alone)
        for name, (alone, beside) in shares.items()
    }
