"""What a profile says is so: every nanosecond somewhere once, on a line of the program, and the ranking torch has."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity

from benchmarks.harness import Bar, Measured
from benchmarks.profile.workloads import WORKLOADS, build
from shoestring.profile import profiled
from shoestring.profile.lines import own_lines
from shoestring.profile.recording import Profile
from shoestring.profile.tree import CallTree, NodeKind

STEPS, ROUNDS = 12, 4


@cache
def exact(name: str) -> Profile:
    """Of some steps of a workload, after the first."""
    torch.set_num_threads(1)
    workload = build(name)
    workload.step()
    with profiled() as result:
        for _ in range(STEPS):
            workload.step()
    return result.profile


def of_backward(tree: CallTree) -> np.ndarray:
    """Functions of the backward pass that no other contains."""
    outermost = np.zeros(len(tree), bool)
    inside = np.zeros(len(tree), bool)
    for node in range(1, len(tree)):
        parent = tree.parent[node]
        backward = tree.kind[node] == NodeKind.BACKWARD
        inside[node] = inside[parent] or backward
        outermost[node] = backward and not inside[parent]
    return outermost


def linked(name: str) -> float:
    """Part of the backward time that is on a link to the forward pass; accumulation has no operator to link to."""
    tree = exact(name).tree
    outermost = of_backward(tree)
    accumulates = np.array(["AccumulateGrad" in tree.names[each] for each in tree.name])
    time = np.where(outermost & ~accumulates, tree.inclusive, 0)
    return float(time[tree.kind[tree.parent] == NodeKind.LINK].sum() / time.sum())


def on_lines(name: str) -> float:
    """Part of the operators' own time that has a line of the program above it, or above what it is linked to."""
    tree = exact(name).tree
    time = np.where(np.isin(tree.kind, (NodeKind.ROOT, NodeKind.PYTHON)), 0, tree.own)
    return float(time[tree.nearest(own_lines(tree)) >= 0].sum() / time.sum())


def not_conserved(name: str) -> float:
    """Nanoseconds by which inclusive times differ from the sums of what is below."""
    tree = exact(name).tree
    sums = tree.own.copy()
    for node in range(len(tree) - 1, 0, -1):
        sums[tree.parent[node]] += sums[node]
    return float(np.abs(sums - tree.inclusive).sum() + abs(tree.own.sum() - tree.inclusive[0]))


def beyond_wall(name: str) -> float:
    """Difference of the tree's total, with what recording took, from the seconds that went by."""
    profile = exact(name)
    total = float(profile.tree.inclusive[0]) / 1e9 + profile.facts.overhead
    return abs(total / profile.facts.seconds - 1)


@dataclass(frozen=True)
class OwnTimes:
    """What operators of a workload took without those that they called, by name: the least of some rounds."""

    ours: Counter[str]
    """Nanoseconds."""
    torchs: Counter[str]
    """Microseconds, by torch.profiler."""
    again: Counter[str]
    """The same of other rounds."""
    called: Counter[str]
    """Calls of other operators that an operator made in a round."""


@cache
def own_times(name: str) -> OwnTimes:
    """Of both profilers, by turns."""
    workload = build(name)
    workload.step()
    ours, torchs, called = Counter[str](), [Counter[str](), Counter[str]()], Counter[str]()
    for _ in range(ROUNDS):
        with profiled() as result:
            for _ in range(STEPS // 2):
                workload.step()
        tree, found, called = result.profile.tree, Counter[str](), Counter[str]()
        for node in np.flatnonzero(_recorded(tree)):
            found[tree.names[tree.name[node]]] += int(tree.own[node])
        ours = least(ours, found)
        caller = tree.nearest(_recorded(tree) & (tree.link < 0))[tree.parent]
        for node in np.flatnonzero(_recorded(tree) & (caller >= 0)):
            called[tree.names[tree.name[caller[node]]]] += int(tree.count[node])
        for number in (0, 1):
            with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as theirs:
                for _ in range(STEPS // 2):
                    workload.step()
            times = Counter({event.key: event.self_cpu_time_total for event in theirs.key_averages()})
            torchs[number] = least(torchs[number], times)
    return OwnTimes(ours, torchs[0], torchs[1], called)


def _recorded(tree: CallTree) -> np.ndarray:
    return np.isin(tree.kind, (NodeKind.OPERATOR, NodeKind.BACKWARD, NodeKind.SPAN))


@cache
def torchs_cost() -> float:
    """Microseconds that torch.profiler adds for each operator that another one calls."""
    x, weight, bias = torch.ones(1, 8), torch.ones(4, 8), torch.ones(4)

    def run() -> float:
        began = time.process_time()
        for _ in range(1000):
            F.linear(x, weight, bias)
        return time.process_time() - began

    plain = min(run() for _ in range(5))
    added, operators = math.inf, 0
    for _ in range(5):
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as theirs:
            added = min(added, run() - plain)
        operators = sum(event.count for event in theirs.key_averages())
    return 1e6 * added / operators


def spearman(first: Counter[str], second: Counter[str], operators: Iterable[str]) -> float:
    """Correlation of the ranks of these operators in both."""
    names = sorted(operators)
    one, other = (np.argsort(np.argsort([of[name] for name in names])) for of in (first, second))
    return float(np.corrcoef(one, other)[0, 1])


def ranking(name: str) -> float:
    """Of all operators that both have."""
    times = own_times(name)
    return spearman(times.ours, times.torchs, times.ours.keys() & times.torchs.keys())


def ranking_of_larger(name: str) -> float:
    """Of the operators that take 0.1% of the time at least: on others two runs of torch.profiler do not agree."""
    times = own_times(name)
    both = times.ours.keys() & times.torchs.keys()
    return spearman(times.ours, times.torchs, [each for each in both if times.ours[each] >= times.ours.total() / 1000])


def ranking_without_recording(name: str) -> float:
    """Of all operators, where torch's times are without what it takes to record the operators that they call.

    That is a part of what torch.profiler shows as the caller's own time; ours is without our part of it.
    """
    times, cost = own_times(name), torchs_cost()
    both = times.ours.keys() & times.torchs.keys()
    theirs = Counter({each: max(times.torchs[each] - cost * times.called[each], 0) for each in both})
    return spearman(times.ours, theirs, both)


def torchs_agreement(name: str) -> float:
    """Of torch.profiler with itself, in other rounds."""
    times = own_times(name)
    return spearman(times.torchs, times.again, times.torchs.keys() & times.again.keys())


def least(before: Counter[str], now: Counter[str]) -> Counter[str]:
    """Of each operator the smaller time."""
    return before & now if before else now


def differing(name: str) -> float:
    """Losses of some steps that are other numbers with a profile than without."""
    plain, watched = build(name), build(name)
    torch.manual_seed(1)
    expected = [plain.step() for _ in range(STEPS)]
    torch.manual_seed(1)
    with profiled():
        found = [watched.step() for _ in range(STEPS)]
    return float(sum(a != b for a, b in zip(expected, found, strict=True)))


def _each(measure: Callable[[str], float], worst: Callable[..., float]) -> Measured:
    values = {name: measure(name) for name in WORKLOADS}
    said = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    return Measured(worst(values.values()), said)


def _ranking_of_all() -> Measured:
    measured, itself = _each(ranking, min), _each(torchs_agreement, min)
    return Measured(measured.value, f"{measured.note}; torch.profiler with itself: {itself.note}")


def rows() -> list[Bar]:
    return [
        Bar(
            "profile.lines",
            "part of the operators' time that has a line of the program, smallest of ten workloads",
            ">=",
            0.99,
            lambda deadline: _each(on_lines, min),
            kind="exact",
        ),
        Bar(
            "profile.linked",
            "part of the backward time that is linked to the forward pass, smallest of ten workloads",
            ">=",
            0.99,
            lambda deadline: _each(linked, min),
            kind="exact",
        ),
        Bar(
            "profile.conserved",
            "nanoseconds by which times of nodes differ from the sums of what is below, largest of ten workloads",
            "<=",
            0.0,
            lambda deadline: _each(not_conserved, max),
            kind="exact",
        ),
        Bar(
            "profile.wall",
            "difference of the tree's total, with what recording took, from the time that went by, largest of ten"
            " workloads",
            "<=",
            0.02,
            lambda deadline: _each(beyond_wall, max),
        ),
        Bar(
            "profile.ranking",
            "Spearman's correlation of own times with torch.profiler's, of operators that take 0.1% of them or more,"
            " smallest of ten workloads",
            ">=",
            0.99,
            lambda deadline: _each(ranking_of_larger, min),
            kind="drawn",
        ),
        Bar(
            "profile.ranking-all",
            "Spearman's correlation of own times with torch.profiler's, of all operators, smallest of ten workloads",
            ">=",
            0.99,
            lambda deadline: _ranking_of_all(),
            kind="drawn",
        ),
        Bar(
            "profile.ranking-without-recording",
            "Spearman's correlation of own times of all operators with torch.profiler's less what it takes to record"
            " what they call, smallest of ten workloads",
            ">=",
            0.99,
            lambda deadline: _each(ranking_without_recording, min),
            kind="drawn",
        ),
        Bar(
            "profile.identical",
            "losses of 12 steps that differ with a profile from those without, most of ten workloads",
            "<=",
            0.0,
            lambda deadline: _each(differing, max),
            kind="exact",
        ),
    ]
