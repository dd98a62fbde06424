"""Measures the latency and the bandwidth of collectives and messages between the ranks of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import all_gather_single, reduce_scatter_single
from shoestring.core.world import World
from shoestring.planning.cluster import Collective

SMALLEST, GROWTH = 1 << 10, 4  # bytes of the smallest message, and ratio of each size to the size before
PATIENCE = 0.3  # seconds of a collective above which no larger messages are measured


KINDS = ("all-reduce", "all-gather", "all-to-all")


def time_collectives(world: World, over: Sequence[str], largest: int = 1 << 24) -> tuple[Collective, ...]:
    """Measure each of `KINDS` along the mesh axes `over`; empty if only one rank lies along them. A collective."""
    return tuple(time_collective(world, kind, over, largest) for kind in KINDS if world.ranks_over(over) > 1)


def time_collective(world: World, kind: str, over: Sequence[str], largest: int = 1 << 24) -> Collective:
    """Measure latency and bandwidth of a collective along the mesh axes `over`. Every rank must call this.

    Messages have up to `largest` bytes. A message is what one rank contributes. In an all-reduce, a reduce-scatter or
    an all-to-all it is the whole tensor; in an all-gather it is the rank's own shard. In a "message" all ranks except
    the last send a message to the next rank at the same time. In a "swap" the first and the last rank send each other a
    message at the same time, which takes longer on slow links.
    """
    group = world.group(over)
    assert group is not None
    size = group.size()

    def send(sent: Tensor) -> None:
        place = dist.get_group_rank(group, world.rank)
        works = [dist.isend(sent, group=group, group_dst=place + 1)] if place + 1 < size else []
        works += [dist.irecv(torch.empty_like(sent), group=group, group_src=place - 1)] if place else []
        for work in works:
            assert work is not None
            work.wait()

    def swap(sent: Tensor) -> None:
        place = dist.get_group_rank(group, world.rank)
        if place in (0, size - 1):
            other = size - 1 - place
            works = [
                dist.isend(sent, group=group, group_dst=other),
                dist.irecv(torch.empty_like(sent), group=group, group_src=other),
            ]
            for work in works:
                assert work is not None
                work.wait()

    kinds: dict[str, Callable[[Tensor], object]] = {
        "all-reduce": lambda sent: dist.all_reduce(sent, group=group),
        "all-gather": lambda sent: all_gather_single(sent.new_empty(size * len(sent)), sent, group=group),
        "all-to-all": lambda sent: dist.all_to_all_single(torch.empty_like(sent), sent, group=group),
        "reduce-scatter": lambda sent: reduce_scatter_single(sent.new_empty(len(sent) // size), sent, group=group),
        "message": send,
        "swap": swap,
    }
    sizes, seconds = _time_messages(world, kinds[kind], largest)
    latency, per_byte = fit_line(sizes, seconds)
    points = tuple(zip(sizes, seconds, strict=True))
    return Collective(kind=kind, over=tuple(over), ranks=size, latency=latency, bandwidth=1 / per_byte, points=points)


def _time_messages(world: World, work: Callable[[Tensor], object], largest: int) -> tuple[list[float], list[float]]:
    """Time `work` on messages of growing size; returns the sizes in bytes, and the slowest rank's seconds."""
    sizes: list[float] = []
    seconds: list[float] = []
    nbytes, ranks = SMALLEST, world.size
    while nbytes <= largest and (not seconds or seconds[-1] < PATIENCE):
        message = torch.zeros(nbytes // 4 // ranks * ranks or ranks, device=world.device)
        repeats = 3 if seconds and seconds[-1] > PATIENCE / GROWTH / 4 else 7
        own = _median_seconds(partial(work, message), world.device, repeats)
        slowest = torch.tensor(own, dtype=torch.float64, device=world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks stop at the same size
        seconds.append(float(slowest))
        sizes.append(message.nbytes)
        nbytes *= GROWTH
    # A message cannot take longer than a larger one; where it was measured to, the larger message's time is used.
    return sizes, [*accumulate(reversed(seconds), min)][::-1]


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `work` after one warm-up run. The warm-up also uses up the burst that a traffic shaper or a switch
    lets pass at full speed."""
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

    Relative errors are used so that large sizes do not dominate the fit.

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
    # A switch or a shaper may let bursts pass, so short messages can be faster than any line with a, b >= 0. Then only
    # the longest message counts.
    return 0.0, float(t[n.argmax()] / n.max())
