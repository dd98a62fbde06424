"""What a profile costs: processor time that it adds to a training step, beside torch's profiler.

All modes of a workload alternate in one process. Added time is of minima, because everything else that runs on a
machine only adds: rounds are dealt into three hands, each gives the ratio of its minima, and the median of these is
the figure.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.harness import Bar, Measured, stored
from benchmarks.profile.workloads import WORKLOADS, Workload, build
from shoestring.profile import profiled

ROUNDS, HANDS = 6, 3
RUN = 0.15
"""Seconds of a run, of one step at least."""
SETTLED = 2
"""Steps of a run before time counts: torch and we look at more of what is new."""
SHARE, BUDGET = 0.05, 0.03
BLOCK = round(1 / SHARE)
"""Steps of which one is recorded. Runs of the sampled modes are of whole blocks, so that all have as many windows."""

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def after_a_profile() -> Iterator[None]:
    """Nothing is recorded any more."""
    with profiled():
        pass
    yield


def torchs(stacks: bool = False) -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=stacks)


SHORT: Mapping[str, Mode] = {
    "off": nullcontext,
    "exact": profiled,
    "torch": torchs,
    "stacks": partial(torchs, stacks=True),
    "stopped": after_a_profile,
}
LONG: Mapping[str, Mode] = {
    "off": nullcontext,
    "sampled": partial(profiled, share=SHARE),
    "budget": partial(profiled, budget=BUDGET),
}


def seconds(workload: Workload, mode: Mode, steps: int) -> float:
    """Processor seconds of a step in a mode, without its beginning and its end."""
    gc.collect()
    with mode():
        for _ in range(SETTLED):
            workload.step()
        began = time.process_time()
        for _ in range(steps):
            workload.step()
        return (time.process_time() - began) / steps


def alternating(workload: Workload, modes: Mapping[str, Mode], steps: int, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a step, by mode and round; every second round goes backwards."""
    found: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(rounds):
        for name in list(modes)[:: 1 if number % 2 else -1]:
            found[name].append(seconds(workload, modes[name], steps))
    return found


def measure(name: str) -> dict[str, Any]:
    """All modes of one workload."""
    torch.set_num_threads(1)
    workload = build(name)
    step = min(seconds(workload, nullcontext, 1) for _ in range(3))
    gc.freeze()
    gc.disable()
    try:
        short = alternating(workload, SHORT, max(1, round(RUN / step)), ROUNDS)
        long = alternating(workload, LONG, BLOCK * max(1, round(RUN / step / BLOCK)), HANDS)
    finally:
        gc.enable()
        gc.unfreeze()
    return {"short": short, "long": long}


def ratios(times: Mapping[str, list[float]], mode: str) -> list[float]:
    """Of each hand: its fastest run in the mode over its fastest without."""
    return [min(times[mode][hand::HANDS]) / min(times["off"][hand::HANDS]) for hand in range(HANDS)]


class Costs:
    """Ratios of all workloads by mode; each is measured once and kept."""

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        self.folder, self.check = folder, check

    def times(self, name: str) -> dict[str, Any]:
        return stored(self.folder / f"{name}.json", self.check, partial(measure, name))

    def ratio(self, name: str, mode: str) -> float:
        return statistics.median(self.all_ratios(name, mode))

    def all_ratios(self, name: str, mode: str) -> list[float]:
        return ratios(self.times(name)["short" if mode in SHORT else "long"], mode)

    def note(self, mode: str) -> str:
        """Each workload's ratio with its spread over the hands."""
        parts = []
        for name in WORKLOADS:
            found = self.all_ratios(name, mode)
            parts.append(f"{name} {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        return ", ".join(parts)

    def dear(self) -> list[str]:
        """Workloads to which torch's profiler adds 5% at least."""
        return [name for name in WORKLOADS if self.ratio(name, "torch") >= 1.05]

    def beside(self, mode: str) -> Measured:
        """The largest added time over that of a mode of torch's profiler, where that is dear."""
        shares = {name: max(self.ratio(name, "exact") - 1, 0) / (self.ratio(name, mode) - 1) for name in self.dear()}
        said = ", ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
        return Measured(max(shares.values()), f"added by torch: {self.note(mode)}; ours over that: {said}")

    def elsewhere(self) -> Measured:
        """The largest added time over what is allowed where torch's profiler adds little."""
        over = {
            name: (self.ratio(name, "exact") - 1) / max(0.02, 0.8 * (self.ratio(name, "torch") - 1))
            for name in WORKLOADS
            if name not in self.dear()
        }
        if not over:
            return Measured(0.0, "torch's profiler adds 5% or more to every workload")
        return Measured(max(over.values()), ", ".join(f"{name} {value:.2f}" for name, value in over.items()))

    def mean(self) -> Measured:
        logs = [math.log(self.ratio(name, "exact")) for name in WORKLOADS]
        return Measured(math.exp(statistics.fmean(logs)), self.note("exact"))

    def largest(self, mode: str) -> Measured:
        return Measured(max(self.ratio(name, mode) for name in WORKLOADS), self.note(mode))

    def typical(self, mode: str) -> Measured:
        return Measured(statistics.median(self.ratio(name, mode) for name in WORKLOADS), self.note(mode))

    def beyond_budget(self) -> Measured:
        """Percentage points by which the budget is missed: by less of it, where the exact mode would use all of it."""
        missed = {}
        for name in WORKLOADS:
            added, exact = self.ratio(name, "budget") - 1, self.ratio(name, "exact") - 1
            missed[name] = 100 * (abs(added - BUDGET) if exact > BUDGET else max(added - BUDGET, 0.0))
        return Measured(max(missed.values()), self.note("budget"))


def rows(costs: Callable[[], Costs]) -> list[Bar]:
    return [
        Bar(
            "profile.exact-beside-stacks",
            "time that an exact profile adds over that of torch.profiler with_stack, largest of the workloads to which"
            " torch.profiler adds 5% or more",
            "<=",
            0.45,
            lambda deadline: costs().beside("stacks"),
        ),
        Bar(
            "profile.exact-beside-torch",
            "time that an exact profile adds over that of torch.profiler without stacks, largest of the workloads to"
            " which that adds 5% or more",
            "<=",
            0.8,
            lambda deadline: costs().beside("torch"),
        ),
        Bar(
            "profile.exact-elsewhere",
            "time that an exact profile adds, over the larger of 2% and 0.8 of what torch.profiler adds, largest of the"
            " other workloads",
            "<=",
            1.0,
            lambda deadline: costs().elsewhere(),
        ),
        Bar(
            "profile.exact",
            "processor time of a step with an exact profile over that without, geometric mean over ten workloads",
            "<=",
            1.10,
            lambda deadline: costs().mean(),
        ),
        Bar(
            "profile.sampled-worst",
            "processor time of a step with one of 20 steps recorded over that without, largest of ten workloads",
            "<=",
            1.06,
            lambda deadline: costs().largest("sampled"),
        ),
        Bar(
            "profile.sampled-typical",
            "processor time of a step with one of 20 steps recorded over that without, median of ten workloads",
            "<=",
            1.02,
            lambda deadline: costs().typical("sampled"),
        ),
        Bar(
            "profile.budget",
            "percentage points by which a budget of 3% of processor time is missed, largest of ten workloads",
            "<=",
            1.0,
            lambda deadline: costs().beyond_budget(),
        ),
        Bar(
            "profile.stopped",
            "processor time of a step after a profile has ended over that before, median of ten workloads",
            "<=",
            1.01,
            lambda deadline: costs().typical("stopped"),
        ),
    ]
