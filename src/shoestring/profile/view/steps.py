"""The optimizer steps of a profile as a small chart: how long each took, and how much memory was held after it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shoestring.profile.recording import Facts, StepTimes
from shoestring.profile.summary import seconds
from shoestring.report.figures import size
from shoestring.report.markup import Markup, join, tag

_WIDTH, _HEIGHT = 1000, 120


def steps(facts: Facts) -> Markup:
    """The chart with its figures in words; nothing where fewer than three entries are known."""
    clock = facts.clock
    if len(clock) < 3:
        return Markup()
    times = [each.seconds / each.steps for each in clock]
    longest = max(clock, key=lambda each: each.longest)
    said = (
        f"{sum(each.steps for each in clock):,} steps of {seconds(median(times) * 1e9)} (median);"
        f" the longest, {_names(longest)}, took {seconds(longest.longest * 1e9)}."
    )
    first, last = clock[0].resident, clock[-1].resident
    held = f" The process held {size(first)} at first and {size(last)} at last." if first and last else ""
    chart = tag(
        "svg",
        tag("polyline", points=_points(clock, [each.longest for each in clock]), class_="longest"),
        tag("polyline", points=_points(clock, times), class_="mean"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"Time of each optimizer step. {said}",
        class_="steps",
    )
    return tag("section", tag("h2", "Optimizer steps"), tag("p", said + held, class_="quiet"), chart)


def _names(each: StepTimes) -> str:
    number = each.first + 1
    return f"step {number:,}" if each.steps == 1 else f"one of steps {number:,} to {each.first + each.steps:,}"


def _points(clock: Sequence[StepTimes], values: Sequence[float]) -> str:
    """Steps from left to right and times from below, so that the longest step of all is at the top."""
    count, most = clock[-1].first + clock[-1].steps - clock[0].first, max(each.longest for each in clock) or 1.0
    begin = clock[0].first
    return join(
        f"{_WIDTH * (x - begin) / count:.1f},{_HEIGHT * (1 - value / most * 0.95):.1f} "
        for each, value in zip(clock, values, strict=True)
        for x in (each.first, each.first + each.steps)
    )
