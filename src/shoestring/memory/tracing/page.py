"""The page of a recording of memory: one HTML file that works offline and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.memory.tracing.recording import KINDS, Held, MemoryProfile, MemoryWindow, StepPeak, Timeline
from shoestring.memory.tracing.summary import by_size, outside
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.figures import size
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.sections import bar

_WIDTH, _HEIGHT = 1000, 300
_TENSORS = 5000
"""Rows of one kind that are shown; what is behind them adds up to little, and is in the file."""


def write(profile: MemoryProfile, path: Path) -> Path:
    """Write the page.

    Raises:
        ShoestringError: the file cannot be written.
    """
    devices = sorted(profile.windows, key=lambda name: name == "cpu")
    lines = {device: profile.windows[device].timeline() for device in devices}
    parts = [part for device in devices for part in _device(profile, device, lines[device])]
    ranks = profile.facts.ranks
    if ranks:
        rows = [[name, size(peak)] for name, peak in ranks.items()]
        parts.append(_section("Ranks", grid("The most bytes of each; this page is of the highest", _RANK_HEAD, rows)))
    notes = [*outside(profile), f"{profile.facts.events:,} allocations and releases were recorded."]
    parts.append(_section("Outside of torch's allocators", tag("ul", *(tag("li", note) for note in notes))))
    title = f"Memory: {size(profile.main.peak)} on {profile.device}"
    heading = tag("div", tag("h1", title), tag("p", "What the peak is of", class_="quiet"), class_="title")
    return save(path, document(title, heading, join(parts), [_payload(lines[each]) for each in devices], _frame()))


_RANK_HEAD = ("Rank", "Peak")
_KIND_HEAD = ("Kind", "Share", "Size", "Tensors")
_TENSOR_HEAD = ("BlockName", "Operator", "Share", "Size", "Tensors")


@cache
def _frame() -> PageFrame:
    style = packaged("shoestring.report", "page.css") + packaged("shoestring.memory.tracing", "memory.css")
    script = packaged("shoestring.report", "elements.js") + packaged("shoestring.memory.tracing", "memory.js")
    return PageFrame(style, script)


def _device(profile: MemoryProfile, device: str, timeline: Timeline) -> list[Markup]:
    window = profile.windows[device]
    held, kinds = window.held(), by_size(window)
    counts = {kind: sum(each.tensors for each in held if each.name.kind == kind) for kind, _ in kinds}
    rows = [
        [_key(kind), _share(nbytes, kinds[0][1], window.peak), size(nbytes), f"{counts[kind]:,}"]
        for kind, nbytes in kinds
    ]
    details = [
        tag(
            "details",
            tag("summary", f"{kind}: {size(nbytes)}"),
            _tensors([each for each in held if each.name.kind == kind], window.peak),
        )
        for kind, nbytes in kinds
    ]
    return [
        _section(f"{device}: {size(window.peak)} at the peak, in step {window.step + 1}", _chart(window, timeline)),
        _section("The peak by kind", grid("The largest first", _KIND_HEAD, rows, figures=2)),
        _section("The peak, tensor by tensor", *details),
        _steps(profile.facts.steps.get(device, [])),
    ]


def _chart(window: MemoryWindow, timeline: Timeline) -> Markup:
    """The kinds stacked over the time of the window, and a line at its peak."""
    seconds, stacked = timeline.seconds, timeline.by_kind.cumsum(axis=0)
    total = stacked[-1] if len(seconds) else np.zeros(0)
    if not len(seconds):
        return Markup()
    x = np.repeat(_WIDTH * seconds / (seconds[-1] or 1), 2)[1:]  # what is held stays until the next moment
    y = np.repeat(_HEIGHT * (1 - stacked / (total.max() or 1)), 2, axis=1)[:, :-1]
    below = np.full(len(x), float(_HEIGHT))
    areas: list[Markup] = []
    for index, kind in enumerate(KINDS):
        if timeline.by_kind[index].any():
            points = _points(x, y[index]) + " " + _points(x[::-1], below[::-1])
            areas.append(tag("polygon", tag("title", kind), points=points, class_=f"kind{index}"))
        below = y[index]
    peak = float(_WIDTH * seconds[int(total.argmax())] / (seconds[-1] or 1))
    areas.append(tag("polyline", points=f"{peak:.1f},0 {peak:.1f},{_HEIGHT}", class_="peak"))
    legend = [tag("li", _key(kind)) for index, kind in enumerate(KINDS) if timeline.by_kind[index].any()]
    said = f"Bytes by kind over {seconds[-1]:.3f} s, from {size(float(total[0]))} to {size(float(total.max()))}."
    more = f" {window.forgotten:,} short-lived blocks are left out." if window.forgotten else ""
    svg = tag(
        "svg",
        *areas,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=said,
        tabindex=0,
        class_="stack",
    )
    return tag(
        "figure",
        tag("figcaption", said + more + " The dashed line is the peak.", class_="quiet"),
        svg,
        tag("p", class_="moment", aria_live="polite"),
        tag("ul", *legend, class_="legend"),
        class_="memory",
    )


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _key(kind: str) -> Markup:
    return join([tag("span", class_=f"dot kind{KINDS.index(kind)}", aria_hidden="true"), f" {kind}"])


def _share(nbytes: int, largest: int, peak: int) -> Markup:
    return tag(
        "div", bar(nbytes / (largest or 1)), tag("span", f"{nbytes / (peak or 1):.1%}", class_="figure"), class_="share"
    )


def _tensors(held: Sequence[Held], peak: int) -> Markup:
    rows = [
        [each.name.name, each.name.operator, f"{each.nbytes / (peak or 1):.2%}", size(each.nbytes), f"{each.tensors:,}"]
        for each in held[:_TENSORS]
    ]
    rest = held[_TENSORS:]
    if rest:
        rows.append([f"{len(rest):,} more", "", "", size(sum(each.nbytes for each in rest)), ""])
    return grid("The largest first", _TENSOR_HEAD, rows, figures=2)


def _steps(steps: Sequence[StepPeak]) -> Markup:
    """The peak of each step as a small chart, where there are several."""
    if len(steps) < 3:
        return Markup()
    highest = max(each.peak for each in steps) or 1
    last = steps[-1].first + steps[-1].steps
    points = " ".join(
        f"{_WIDTH * number / last:.1f},{100 * (1 - each.peak / highest):.1f}"
        for each in steps
        for number in (each.first, each.first + each.steps)
    )
    first, most, end = (size(peak) for peak in (steps[0].peak, highest, steps[-1].peak))
    said = f"Peaks of {last:,} steps: {first} at first, {most} at most, {end} at last."
    chart = tag(
        "svg",
        tag("polyline", points=points, class_="mean"),
        viewBox=f"0 0 {_WIDTH} 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=said,
        class_="steps",
    )
    return _section("Peak of each step", tag("p", said, class_="quiet"), chart)


def _payload(timeline: Timeline) -> dict[str, Any]:
    shown = [index for index in range(len(KINDS)) if timeline.by_kind[index].any()]
    return {
        "seconds": [round(float(each), 6) for each in timeline.seconds],
        "kinds": {KINDS[index]: timeline.by_kind[index].tolist() for index in shown},
    }


def _section(title: str, *children: str) -> Markup:
    return tag("section", tag("h2", title), *children)
