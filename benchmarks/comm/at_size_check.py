"""Whether CUDA graphs do what eager passes do, and how long both take: `benchmarks.comm.at_size --check`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.comm.at_size import AtSizeContest
from benchmarks.comm.replicas import Passes, Replicas
from benchmarks.comm.setting import RANKS

LARGEST = 0.02  # difference of gradients, over their largest magnitude, that roundings to bf16 can come to


def check(found: AtSizeContest, steps: int = 5) -> Passes:
    """Print, for each method, how far graphs and eager passes differ and how long they take: the fastest right ones.

    Gradients are of equal weights and batches. Weights are after twice `steps` steps, where roundings have grown.
    """
    right: set[Passes] = {"together", "in-turn", "eager"}
    took: dict[Passes, float] = dict.fromkeys(right, 0.0)
    for method in found.size.methods:
        if method.local:
            every = min(steps, method.settings["every"])  # so that all merge
            method = replace(method, settings={**method.settings, "every": every})
        eager, graphed = (found.replicas(method.at(1e-3), 1, passes) for passes in ("eager", "together"))
        ways: dict[Passes, Callable[[], None]] = {
            "eager": eager.passes,
            "in-turn": partial(graphed.passes, together=False),
            "together": graphed.passes,
        }
        apart: dict[Passes, float] = {}
        for name, passes in ways.items():
            for grad in gradients(graphed if name != "eager" else eager):
                grad.fill_(math.nan)  # or what was there before would do
            passes()
            apart[name] = furthest(gradients(eager), gradients(graphed if name != "eager" else eager))
        right -= {name for name, value in apart.items() if value > LARGEST}
        if method.kind == "ddp":
            took = {name: milliseconds(passes, 2 * steps, found.device) for name, passes in ways.items()}
            print(f"  passes of {RANKS} ranks: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in took.items()))
        times = []
        for each in (eager, graphed):
            milliseconds(each.step, steps, found.device)
            times.append(milliseconds(each.step, steps, found.device))
        weights = furthest(*([p for model in each.models for p in model.parameters()] for each in (eager, graphed)))
        print(
            f"  {method.name}: gradients differ by {apart['in-turn']:.1e} in turn and {apart['together']:.1e} together,"
            f" weights by {weights:.1e}; {times[0]:.1f} ms a step eager, {times[1]:.1f} with"
            f" {len(graphed.graphs)} graphs",
            flush=True,
        )
    return min(right, key=took.__getitem__)


def gradients(replicas: Replicas) -> list[Tensor]:
    return [grad for room in replicas.grads for grad in room.values()]


def furthest(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors, over the largest magnitude in its tensor; infinite for NaN."""
    found = [
        float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1e-12))
        for one, other in zip(these, those, strict=True)
    ]
    return max(value if math.isfinite(value) else math.inf for value in found)


def milliseconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Of one call, of several one after the other."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / times
