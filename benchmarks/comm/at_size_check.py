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
from benchmarks.comm.setting import RANKS


def check(found: AtSizeContest, steps: int = 5) -> bool:
    """Print how far graphs and eager passes differ and how long they take, for each method; whether they agree.

    Gradients are of equal weights and batches. Weights are after twice `steps` steps, where roundings have grown.
    """
    fine = True
    for method in found.size.methods:
        if method.local:
            every = min(steps, method.settings["every"])  # so that all merge
            method = replace(method, settings={**method.settings, "every": every})
        eager, graphed = (found.replicas(method.at(1e-3), 1, graphs=graphs) for graphs in (False, True))
        apart = []
        for together in (False, True):
            eager.passes()
            graphed.passes(together=together)
            apart.append(
                furthest([t for g in eager.grads for t in g.values()], [t for g in graphed.grads for t in g.values()])
            )
        if method.kind == "ddp":
            for name, passes in (
                ("eager", eager.passes),
                ("graphs in turn", partial(graphed.passes, together=False)),
                ("graphs side by side", graphed.passes),
            ):
                print(f"  passes of {RANKS} ranks, {name}: {milliseconds(passes, steps, found.device):.1f} ms")
        times = []
        for each in (eager, graphed):
            milliseconds(each.step, steps, found.device)
            times.append(milliseconds(each.step, steps, found.device))
        weights = furthest(*([p for model in each.models for p in model.parameters()] for each in (eager, graphed)))
        fine = fine and max(apart) < 0.02
        print(
            f"  {method.name}: gradients differ by {apart[0]:.1e} (in turn), {apart[1]:.1e} (side by side), weights by"
            f" {weights:.1e}; {times[0]:.1f} ms a step eager, {times[1]:.1f} by graphs ({len(graphed.graphs)})",
            flush=True,
        )
    return fine


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
