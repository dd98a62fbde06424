"""Measures the time of codecs on this cluster, and how much codecs and collectives slow down computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoestring.comm.codecs.codec import CodecFactory, Coding, ExchangeContext, advance
from shoestring.comm.codecs.lockstep import run_alone
from shoestring.comm.exchange.wire import all_finite
from shoestring.planning.links import synchronize

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

    No network is used: the results of collectives are computed as if all ranks had sent the same data. Because codecs
    may alternate between two kinds of steps, the bytes are the mean of two steps, and `repeats` should be even.
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
    """Wrap a codec's generator, and append the times of its computation before, between and after requests to
    `seconds`."""
    answers = None
    while True:
        synchronize(device)
        began = time.perf_counter()
        if len(seconds) == 1 and answers is not None:
            all_finite(answers)  # `Wire.run` checks the first stage's results too, so the check's time counts
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
        other: function that repeats its work n times when called with n; it runs on a separate thread.
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
    """Compute the slowdown factors of two kinds of work, from the time that each takes alone and beside the other.

    Both kinds of work begin at the same time and slow down while both run. After the shorter work ends, the rest of the
    longer work runs at full speed.
    """
    both = min(one_beside, other_beside)
    shares = {"one": (one, one_beside), "other": (other, other_beside)}
    return {
        name: max(1.0, both / done) if (done := alone - (beside - both)) > 0 else max(1.0, beside / alone)
        for name, (alone, beside) in shares.items()
    }
