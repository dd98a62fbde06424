"""What exchanges cost here: the collectives that codecs use, the codecs themselves, and what both do to computing."""

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
from shoestring.comm.codecs.codec import Codec, Gather, Grads, Mean, Request, Turn
from shoestring.comm.exchange.wire import all_finite
from shoestring.core.world import World
from shoestring.planning.cluster import Collective

SMALLEST, GROWTH = 1 << 10, 4  # bytes of the first message, and how much larger the next one is
PATIENCE = 0.3  # seconds of a collective after which no larger one is measured
KINDS = {Mean: "all-reduce", Gather: "all-gather"}  # anything else is swapped: all-to-all


def collectives(world: World, over: Sequence[str], largest: int = 1 << 24) -> tuple[Collective, ...]:
    """Each kind of collective along `over`, fitted to messages of up to `largest` bytes; every rank calls it.

    Bytes are those that each rank hands over: its whole tensor for an all-reduce and an all-to-all, its own part for
    an all-gather. None where this is one rank alone.
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
    found = []
    for kind, work in kinds.items():
        sizes, seconds = _timed(world, work, largest)
        latency, per_byte = fitted(sizes, seconds)
        found.append(Collective(kind=kind, over=tuple(over), ranks=size, latency=latency, bandwidth=1 / per_byte))
    return tuple(found)


def _timed(world: World, work: Callable[[Tensor], object], largest: int) -> tuple[list[float], list[float]]:
    """(bytes, seconds) of `work` on messages of growing size; the seconds are the slowest rank's."""
    sizes: list[float] = []
    seconds: list[float] = []
    nbytes, ranks = SMALLEST, world.size
    while nbytes <= largest and (not seconds or seconds[-1] < PATIENCE):
        message = torch.zeros(nbytes // 4 // ranks * ranks or ranks, device=world.device)
        repeats = 3 if seconds and seconds[-1] > PATIENCE / GROWTH / 4 else 7
        seconds.append(_slowest(world, _median(partial(work, message), world.device, repeats)))
        sizes.append(message.nbytes)
        nbytes *= GROWTH
    return sizes, seconds


def _median(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """After one run to warm up, which also uses up what a shaper or a switch lets pass at once."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        settle(device)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(world: World, seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def fitted(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * size, neither negative: least squares of the relative errors, so that no size rules.

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
class Coded:
    """One exchange of some gradients on this rank: seconds of computing before, between and after its requests, and
    bytes of each kind in each request (one less than there are seconds)."""

    seconds: tuple[float, ...]
    nbytes: tuple[dict[str, int], ...]


def coded(make: Callable[[], Codec], grads: Mapping[str, Tensor], turn: Turn, repeats: int = 3) -> Coded:
    """The codec's own work on `grads`, which stay as they are; the median of `repeats` after one to warm up.

    It is answered as if every rank had said the same, without a network.
    """
    codec, runs = make(), []
    for step in range(repeats + 1):
        fresh = {name: grad.clone() for name, grad in grads.items()}
        runs.append(_once(codec, fresh, Turn(turn.rank, turn.size, step)))
    times = np.median([run.seconds for run in runs[1:]], axis=0)
    return Coded(tuple(times.tolist()), runs[-1].nbytes)


def _once(codec: Codec, grads: Grads, turn: Turn) -> Coded:
    device = next(iter(grads.values())).device
    seconds: list[float] = []
    nbytes: list[dict[str, int]] = []
    with torch.no_grad():
        settle(device)
        began = time.perf_counter()
        coding = codec.code(grads, turn)
        requests = next(coding, None)
        while requests is not None:
            settle(device)
            seconds.append(time.perf_counter() - began)
            nbytes.append(_bytes(requests))
            answers = [_answer(request, turn) for request in requests]
            settle(device)
            began = time.perf_counter()
            if len(seconds) == 1:
                all_finite(answers)
            try:
                requests = coding.send(answers)
            except StopIteration:
                requests = None
        settle(device)
        seconds.append(time.perf_counter() - began)
    return Coded(tuple(seconds), tuple(nbytes))


def _bytes(requests: Sequence[Request]) -> dict[str, int]:
    found: dict[str, int] = {}
    for request in requests:
        kind = KINDS.get(type(request), "all-to-all")
        found[kind] = found.get(kind, 0) + request.tensor.nbytes
    return found


def _answer(request: Request, turn: Turn) -> Tensor:
    if isinstance(request, Gather):
        return request.tensor.expand(turn.size, *request.tensor.shape).clone()
    return request.tensor.clone()


# -- side by side -----------------------------------------------------------------------------------------------------


def hindrance(
    one: Callable[[], object], other: Callable[[int], object], alone: tuple[float, float]
) -> dict[str, float]:
    """How `one` and `other` hinder each other on this rank: {"one": factor, "other": factor}, neither below 1.

    Args:
        other: does its work as many times as it is told, on a thread of its own.
        alone: seconds of `one`, and of `other` once, when nothing goes on beside them.
    """
    times = max(1, round(1.5 * alone[0] / alone[1]))  # so that `other` outlasts `one`
    ended: list[float] = []

    def beside() -> None:
        other(times)
        ended.append(time.perf_counter())

    thread = threading.Thread(target=beside)
    began = time.perf_counter()
    thread.start()
    one()
    together = time.perf_counter() - began
    thread.join()
    return separated(alone[0], alone[1] * times, together, ended[0] - began)


def separated(one: float, other: float, one_beside: float, other_beside: float) -> dict[str, float]:
    """The factors from the seconds of both alone and side by side, both begun at once.

    While both went on, each did its share of the work; the rest of the longer one was done at its own pace.
    """
    both = min(one_beside, other_beside)
    shares = {"one": (one, one_beside), "other": (other, other_beside)}
    return {
        name: max(1.0, both / done) if (done := alone - (beside - both)) > 0 else max(1.0, beside / alone)
        for name, (alone, beside) in shares.items()
    }
