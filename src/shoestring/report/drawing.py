"""Scales, axes and marks of SVG charts that work without scripts, for the pages of tune, profile and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoestring import figures
from shoestring.report.markup import Markup, tag

WIDTH, HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 12, 40


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start), 1)

    def ticks(self) -> list[float]:
        """About five round values within the range, for tick labels."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1)]
            return powers if len(powers) > 1 else [self.low, self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10.0 ** math.floor(math.log10(span / 4))
        # Of 1, 2, 5 and 10 times a power of ten, take the distance between ticks that gives closest to five ticks.
        step *= min((1, 2, 5, 10), key=lambda factor: abs(span / (factor * step) - 5))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [at * step for at in range(first, last + 1)]


def scales(across: Sequence[float], up: Sequence[float]) -> tuple[Scale, Scale]:
    """The horizontal and the vertical scale for the values of a chart; the vertical scale has a margin."""
    low, high = min(up), max(up)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    left, right = min(across), max(across)
    return (
        Scale(left, right if right > left else left + 1, _LEFT, WIDTH - _RIGHT),
        Scale(low - margin, high + margin, HEIGHT - _BOTTOM, _TOP),
    )


def axes(x: Scale, y: Scale, below: str) -> list[Markup]:
    """Grid lines and tick labels of both axes, and the name of the horizontal axis."""
    drawn = []
    for value in y.ticks():
        drawn.append(line(_LEFT, y(value), WIDTH - _RIGHT, y(value), "rule"))
        drawn.append(text(_LEFT - 8, y(value) + 4, figures.plain(_round(value)), anchor="end"))
    for value in x.ticks():
        drawn.append(text(x(value), HEIGHT - _BOTTOM + 18, figures.plain(_round(value))))
    drawn.append(text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 4, below))
    return drawn


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind, stroke="currentColor")


def path(points: Sequence[tuple[float, float]], kind: str, title: str = "") -> Markup:
    """A line through points in pixels."""
    steps = " ".join(f"{'L' if at else 'M'}{x} {y}" for at, (x, y) in enumerate(points))
    inner = [tag("title", title)] if title else []
    return tag("path", *inner, d=steps, class_=kind, fill="none", stroke="currentColor")


def stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of a step curve, which holds each value until the next point."""
    corners = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


def dot(x: float, y: float, kind: str, title: str, radius: float = 4) -> Markup:
    return tag("circle", tag("title", title), cx=x, cy=y, r=radius, class_=kind, fill="currentColor")


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "quiet") -> Markup:
    return tag("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=kind, fill="currentColor")


def picture(parts: Sequence[Markup], label: str, height: int = HEIGHT) -> Markup:
    """Combine the parts of a chart into one SVG element, with `label` as its name for screen readers."""
    return tag(
        "div",
        tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label),
        class_="picture",
        role="region",
        tabindex=0,
        aria_label=label,
    )


_LEVEL_WIDTH, _LEVEL_HEIGHT = 1000, 120


def levels(lines: Mapping[str, Sequence[tuple[int, int, float]]], label: str) -> Markup:
    """A small chart, as wide as its container, of values that are constant over ranges of steps.

    Args:
        lines: maps the CSS class of each line to its ranges in order: (first step, step after the last, value). The
            vertical axis runs from 0 to slightly above the largest value.
    """
    stretches = [stretch for line in lines.values() for stretch in line]
    first, last = min(begin for begin, _, _ in stretches), max(end for _, end, _ in stretches)
    most = max(value for _, _, value in stretches) or 1.0
    drawn = []
    for kind, line in lines.items():
        points = [
            f"{_LEVEL_WIDTH * (step - first) / (last - first):.1f},{_LEVEL_HEIGHT * (1 - 0.95 * value / most):.1f}"
            for begin, end, value in line
            for step in (begin, end)
        ]
        drawn.append(tag("polyline", points=" ".join(points), class_=kind))
    return tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {_LEVEL_WIDTH} {_LEVEL_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        class_="steps",
    )
