"""Charts as SVG, written here so that a page needs no script: scales, axes and marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoestring.report import figures
from shoestring.report.markup import Markup, tag

WIDTH, HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 12, 40


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` as pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (self._place(each) for each in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start), 1)

    def _place(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self) -> list[float]:
        """Round values within the range, about five."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1)]
            return powers if len(powers) > 1 else [self.low, self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= min((1, 2, 5, 10), key=lambda factor: abs(span / (factor * step) - 5))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [at * step for at in range(first, last + 1)]


def scales(across: Sequence[float], up: Sequence[float]) -> tuple[Scale, Scale]:
    """Scales of a chart for what it shows; upwards with a margin."""
    low, high = min(up), max(up)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    left, right = min(across), max(across)
    return (
        Scale(left, right if right > left else left + 1, _LEFT, WIDTH - _RIGHT),
        Scale(low - margin, high + margin, HEIGHT - _BOTTOM, _TOP),
    )


def axes(x: Scale, y: Scale, below: str) -> list[Markup]:
    """Grid lines, their values, and the name of the horizontal axis."""
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
    """The points of a line that keeps each value until the next one."""
    found = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        found += [(x, before), (x, y)]
    return found


def dot(x: float, y: float, kind: str, title: str, radius: float = 4) -> Markup:
    return tag("circle", tag("title", title), cx=x, cy=y, r=radius, class_=kind, fill="currentColor")


def text(x: float, y: float, said: str, anchor: str = "middle", kind: str = "quiet") -> Markup:
    return tag("text", said, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=kind, fill="currentColor")


def picture(parts: Sequence[Markup], label: str, height: int = HEIGHT) -> Markup:
    """The chart, with its name for who cannot see it."""
    return tag(
        "div",
        tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label),
        class_="picture",
        role="region",
        tabindex=0,
        aria_label=label,
    )
