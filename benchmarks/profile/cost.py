"""What a profile costs: processor time that it adds to a training step, beside torch's profiler.

All modes of a workload alternate in one process. Everything else that runs on a machine only adds, so of each mode the
fastest step counts; where steps are of two kinds, recorded and not, that of each kind, by its share. Runs are dealt
into three hands, each of which gives a ratio: their median is the figure, and the others its spread.
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
from shoestring.profile import native_tree
from shoestring.profile.collector import Collector

ROUNDS, LONG_ROUNDS, HANDS = 12, 6, 3
LONG_RUN = 6.0
"""Seconds of a run in which a part is recorded, so that the share settles."""
RUN = 0.1
"""Seconds of a run, of three steps at least."""
BESIDE = 10
"""Steps on each side of a recorded one that it is compared with."""
SETTLED = 1
"""Steps of a run before time counts: torch and we look at more of what is new."""
SHARE, BUDGET = 0.05, 0.03
BLOCK = round(1 / SHARE)
"""Steps of which one is recorded."""


class Watching:
    """A mode in which a profile is recorded."""

    def __init__(self, share: float = 1.0, budget: float | None = None) -> None:
        self.collector = Collector(share=share, budget=budget)

    def __enter__(self) -> Watching:
        self.collector.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.stop()

    @property
    def recording(self) -> bool:
        """Whether the next step is recorded."""
        return self.collector.windows is None or self.collector.windows.recording


@contextmanager
def after_a_profile() -> Iterator[None]:
    """Nothing is recorded any more."""
    with Watching():
        pass
    yield


@contextmanager
def floor() -> Iterator[None]:
    """torch calls something that does nothing for each operator: what no recording of operators can be below."""
    library = native_tree.library()
    library.callpaths_floor(1)
    try:
        yield
    finally:
        library.callpaths_floor(0)


def torchs(stacks: bool = False) -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=stacks)


Mode = Callable[[], AbstractContextManager[Any]]
SHORT: Mapping[str, Mode] = {
    "off": nullcontext,
    "exact": Watching,
    "floor": floor,
    "torch": torchs,
    "stacks": partial(torchs, stacks=True),
    "stopped": after_a_profile,
}
LONG: Mapping[str, Mode] = {
    "off": nullcontext,
    "sampled": partial(Watching, share=SHARE),
    "budget": partial(Watching, budget=BUDGET),
}
Steps = list[tuple[float, bool]]
"""Processor seconds of each step of a run, and whether it was recorded by windows."""


def run(workload: Workload, mode: Mode, steps: int) -> Steps:
    """Steps in a mode, without its beginning and its end."""
    found: Steps = []
    gc.collect()
    with mode() as watching:
        for _ in range(SETTLED):
            workload.step()
        for _ in range(steps):
            recorded = isinstance(watching, Watching) and watching.recording
            began = time.process_time()
            workload.step()
            found.append((time.process_time() - began, recorded))
    return found


def alternating(workload: Workload, modes: Mapping[str, Mode], steps: int, rounds: int) -> dict[str, list[Steps]]:
    """Runs by mode; every second round goes backwards."""
    found: dict[str, list[Steps]] = {name: [] for name in modes}
    for number in range(rounds):
        for name in list(modes)[:: 1 if number % 2 else -1]:
            found[name].append(run(workload, modes[name], steps))
    return found


def measure(name: str) -> dict[str, Any]:
    """All modes of one workload."""
    torch.set_num_threads(1)
    workload = build(name)
    step = min(seconds for seconds, _ in run(workload, nullcontext, 3))
    gc.freeze()
    gc.disable()
    try:
        short = alternating(workload, SHORT, max(3, round(RUN / step)), ROUNDS)
        long = alternating(workload, LONG, BLOCK * max(2, round(LONG_RUN / step / BLOCK)), LONG_ROUNDS)
    finally:
        gc.enable()
        gc.unfreeze()
    return {"short": short, "long": long}


def within(name: str) -> dict[str, float]:
    """Of a run under a budget: the share of steps recorded, what each adds, and what other threads take.

    Runs of seconds differ by more than a budget's few percent on a machine that others use. So each recorded step is
    compared with those beside it, and other threads are told apart by their clocks.
    """
    torch.set_num_threads(1)
    workload = build(name)
    step = min(seconds for seconds, _ in run(workload, nullcontext, 3))
    steps: list[tuple[float, bool]] = []
    whole = threads = 0.0
    gc.collect()
    gc.disable()
    try:
        with Watching(budget=BUDGET) as watching:
            workload.step()
            for _ in range(round(2 * LONG_RUN / step)):
                recorded = watching.recording
                processor, own = time.process_time(), time.thread_time()
                workload.step()
                steps.append((time.thread_time() - own, recorded))
                whole += time.process_time() - processor
                threads += steps[-1][0]
    finally:
        gc.enable()
    compared = []
    for at, (seconds, recorded) in enumerate(steps):
        near = [other for other, kind in steps[max(at - BESIDE, 0) : at + BESIDE + 1] if not kind]
        if recorded and near:
            compared.append(seconds / statistics.median(near) - 1)
    share = sum(recorded for _, recorded in steps) / len(steps)
    return {"share": share, "adds": statistics.median(compared), "beside": whole / threads - 1}


def fastest(runs: list[Steps]) -> float:
    """Seconds of a step: of those recorded and of those not the fastest, each by how many there are."""
    steps = [step for each in runs for step in each]
    kinds = [[seconds for seconds, recorded in steps if recorded == kind] for kind in (False, True)]
    return sum(min(kind) * len(kind) / len(steps) for kind in kinds if kind)


def ratios(times: Mapping[str, list[Steps]], mode: str) -> list[float]:
    """Of each hand: a step in the mode over one without."""
    return [fastest(times[mode][hand::HANDS]) / fastest(times["off"][hand::HANDS]) for hand in range(HANDS)]


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
        note = f"added by torch: {self.note(mode)}; ours over that: {said}; a callback that does nothing: "
        return Measured(max(shares.values()), note + self.note("floor"))

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

    def within_a_run(self) -> Measured:
        """Percentage points by which what a run itself shows is off the budget; under it only where all is recorded."""
        found = {
            name: stored(self.folder / f"{name}-within.json", self.check, partial(within, name)) for name in WORKLOADS
        }
        added = {name: each["share"] * each["adds"] + each["beside"] for name, each in found.items()}
        most = {name: each["adds"] + each["beside"] for name, each in found.items()}
        missed = {name: 100 * (added[name] - BUDGET) for name in WORKLOADS}
        missed = {name: off if off > 0 or most[name] > BUDGET else 0.0 for name, off in missed.items()}
        said = ", ".join(
            f"{name} {100 * added[name]:.2f}% ({100 * each['share']:.0f}% of steps recorded, other threads"
            f" {100 * each['beside']:.2f}%)"
            for name, each in found.items()
        )
        return Measured(max(map(abs, missed.values())), f"over it at most {max(missed.values()):.2f} points; {said}")


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
            "profile.budget-within",
            "percentage points by which a budget of 3% is missed, by steps recorded and not of the same run and by the"
            " clocks of threads, largest of ten workloads",
            "<=",
            1.0,
            lambda deadline: costs().within_a_run(),
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
            "processor time of a step after a profile has ended over that before, the worst of ten workloads",
            "<=",
            1.01,
            lambda deadline: costs().largest("stopped"),
        ),
    ]
