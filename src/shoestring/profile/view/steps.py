"""Draws a small chart of the optimizer steps' times, with a sentence on the process's memory."""

from __future__ import annotations

from statistics import median

from shoestring.figures import memory, seconds
from shoestring.profile.recording import Facts
from shoestring.report.drawing import levels
from shoestring.report.markup import Markup, tag


def steps(facts: Facts) -> Markup:
    """Draw the chart, with a summary in words; empty if there are fewer than three entries."""
    clock = facts.clock
    if len(clock) < 3:
        return Markup()
    times = [entry.seconds / entry.steps for entry in clock]
    longest = max(clock, key=lambda entry: entry.longest)
    number, last_number = longest.first + 1, longest.first + longest.steps
    name = f"step {number:,}" if longest.steps == 1 else f"one of steps {number:,} to {last_number:,}"
    summary = (
        f"{sum(entry.steps for entry in clock):,} steps of {seconds(median(times))} (median);"
        f" the longest, {name}, took {seconds(longest.longest)}."
    )
    first, last = clock[0].resident, clock[-1].resident
    held = f" The process held {memory(first)} at first and {memory(last)} at last." if first and last else ""
    lines = {
        "longest": [(entry.first, entry.first + entry.steps, entry.longest) for entry in clock],
        "mean": [(entry.first, entry.first + entry.steps, time) for entry, time in zip(clock, times, strict=True)],
    }
    chart = levels(lines, f"Time of each optimizer step. {summary}")
    return tag("section", tag("h2", "Optimizer steps"), tag("p", summary + held, class_="quiet"), chart)
