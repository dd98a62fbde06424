"""Writes the page of a memory recording: one HTML file that works offline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.figures import memory, percent, seconds
from shoestring.memory.tracing.recording import KINDS, Held, MemoryProfile, MemoryWindow, StepPeak, Timeline
from shoestring.memory.tracing.summary import by_size, outside
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.drawing import levels
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.sections import section, share_bar

_WIDTH, _HEIGHT = 1000, 300
_TENSORS = 5000
"""Maximum number of table rows per kind; further, smaller tensors are only in the recording's file."""


def write(profile: MemoryProfile, path: Path) -> Path:
    """Write the page of a memory recording.

    Raises:
        ShoestringError: the file cannot be written.
    """
    devices = sorted(profile.windows, key=lambda name: name == "cpu")
    lines = {device: profile.windows[device].timeline() for device in devices}
    parts = [part for device in devices for part in _device(profile, device, lines[device])]
    ranks = profile.facts.ranks
    if ranks:
        rows = [[name, memory(peak)] for name, peak in ranks.items()]
        parts.append(section("Ranks", grid("The most bytes of each; this page is of the highest", _RANK_HEAD, rows)))
    notes = [*outside(profile), f"{profile.facts.events:,} allocations and releases were recorded."]
    parts.append(section("Outside of torch's allocators", tag("ul", *(tag("li", note) for note in notes))))
    title = f"Memory: {memory(profile.main.peak)} on {profile.device}"
    heading = tag("div", tag("h1", title), tag("p", "What the peak is of", class_="quiet"), class_="title")
    return save(path, document(title, heading, join(parts), [_payload(lines[device]) for device in devices], _frame()))


_RANK_HEAD = ("Rank", "Peak")
_KIND_HEAD = ("Kind", "Share", "Size", "Tensors")
_TENSOR_HEAD = ("Tensor", "Operator", "Share", "Size", "Tensors")


@cache
def _frame() -> PageFrame:
    style = packaged("shoestring.report", "page.css") + packaged("shoestring.memory.tracing", "memory.css")
    script = packaged("shoestring.report", "elements.js") + packaged("shoestring.memory.tracing", "memory.js")
    return PageFrame(style, script)


def _device(profile: MemoryProfile, device: str, timeline: Timeline) -> list[Markup]:
    window = profile.windows[device]
    held, kinds, peak = window.held(), by_size(window), window.peak or 1
    counts = {kind: sum(group.tensors for group in held if group.name.kind == kind) for kind, _ in kinds}
    rows = [
        [
            _key(kind),
            share_bar(nbytes / peak, kinds[0][1] / peak),
            memory(nbytes),
            f"{counts[kind]:,}",
        ]
        for kind, nbytes in kinds
    ]
    details = [
        tag(
            "details",
            tag("summary", f"{kind}: {memory(nbytes)}"),
            _tensors([group for group in held if group.name.kind == kind], window.peak),
        )
        for kind, nbytes in kinds
    ]
    return [
        section(f"{device}: {memory(window.peak)} at the peak, in step {window.step + 1}", _chart(window, timeline)),
        section("The peak by kind", grid("The largest first", _KIND_HEAD, rows, figures=2)),
        section("The peak, tensor by tensor", *details),
        _steps(profile.facts.steps.get(device, [])),
    ]


def _chart(window: MemoryWindow, timeline: Timeline) -> Markup:
    """Draw a chart of each kind's bytes over the time of the window, stacked, with a line at the peak."""
    at, stacked = timeline.seconds, timeline.by_kind.cumsum(axis=0)
    total = stacked[-1] if len(at) else np.zeros(0)
    if not len(at):
        return Markup()
    # a step function, because bytes stay constant until the next moment
    x = np.repeat(_WIDTH * at / (at[-1] or 1), 2)[1:]
    y = np.repeat(_HEIGHT * (1 - stacked / (total.max() or 1)), 2, axis=1)[:, :-1]
    below = np.full(len(x), float(_HEIGHT))
    areas: list[Markup] = []
    for index, kind in enumerate(KINDS):
        if timeline.by_kind[index].any():
            points = _points(x, y[index]) + " " + _points(x[::-1], below[::-1])
            areas.append(tag("polygon", tag("title", kind), points=points, class_=f"kind{index}"))
        below = y[index]
    peak = float(_WIDTH * at[int(total.argmax())] / (at[-1] or 1))
    areas.append(tag("polyline", points=f"{peak:.1f},0 {peak:.1f},{_HEIGHT}", class_="peak"))
    legend = [tag("li", _key(kind)) for index, kind in enumerate(KINDS) if timeline.by_kind[index].any()]
    low, high = memory(float(total[0])), memory(float(total.max()))
    summary = f"Memory by kind over {seconds(float(at[-1]))}, from {low} to {high}."
    more = f" {window.forgotten:,} short-lived blocks are left out." if window.forgotten else ""
    svg = tag(
        "svg",
        *areas,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=summary,
        tabindex=0,
        class_="stack",
    )
    return tag(
        "figure",
        tag("figcaption", summary + more + " The dashed line is the peak.", class_="quiet"),
        svg,
        tag("p", class_="moment", aria_live="polite"),
        tag("ul", *legend, class_="legend"),
        class_="memory",
    )


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _key(kind: str) -> Markup:
    return join([tag("span", class_=f"dot kind{KINDS.index(kind)}", aria_hidden="true"), f" {kind}"])


def _tensors(held: Sequence[Held], peak: int) -> Markup:
    rows = [
        [
            group.name.name,
            group.name.operator,
            percent(group.nbytes / (peak or 1)),
            memory(group.nbytes),
            f"{group.tensors:,}",
        ]
        for group in held[:_TENSORS]
    ]
    rest = held[_TENSORS:]
    if rest:
        rows.append([f"{len(rest):,} more", "", "", memory(sum(group.nbytes for group in rest)), ""])
    return grid("The largest first", _TENSOR_HEAD, rows, figures=2, stacked=True)


def _steps(steps: Sequence[StepPeak]) -> Markup:
    """Draw a small chart of the peak of each step; empty if there are fewer than three entries."""
    if len(steps) < 3:
        return Markup()
    highest = max(step.peak for step in steps)
    last = steps[-1].first + steps[-1].steps
    first, most, end = (memory(peak) for peak in (steps[0].peak, highest, steps[-1].peak))
    summary = f"Peaks of {last:,} steps: {first} at first, {most} at most, {end} at last."
    chart = levels({"mean": [(step.first, step.first + step.steps, float(step.peak)) for step in steps]}, summary)
    return section("Peak of each step", tag("p", summary, class_="quiet"), chart)


def _payload(timeline: Timeline) -> dict[str, Any]:
    shown = [index for index in range(len(KINDS)) if timeline.by_kind[index].any()]
    return {
        "seconds": [round(float(second), 6) for second in timeline.seconds],
        "kinds": {KINDS[index]: timeline.by_kind[index].tolist() for index in shown},
    }
