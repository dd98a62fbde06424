"""The markup of the charts that the page's script draws: for each chart, a title, a canvas and a table of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoestring import figures
from shoestring.report.markup import Markup, tag
from shoestring.report.markup import table as grid
from shoestring.report.reading import number

_ROWS = 12  # approximate maximum number of steps in a chart's table of values


def charts(data: dict[str, Any]) -> Markup:
    """Controls, large charts and small charts for the data from `curves.payload`; empty without curves."""
    if not data["large"] and not data["small"]:
        return Markup()
    drawn = [_chart(position, chart, data["runs"]) for position, chart in enumerate(data["large"] + data["small"])]
    cut = len(data["large"])
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("noscript", tag("p", "The charts need JavaScript; the tables of values below do not.")),
        tag("form", id="controls", class_="controls", aria_label="How the curves are drawn"),
        tag("div", *drawn[:cut], class_="large"),
        tag("div", *drawn[cut:], class_="small"),
    )


def _chart(position: int, chart: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Markup:
    unit = f", {chart['unit']}" if chart["unit"] else ""
    thinned = [line for line in chart["lines"] if line["logged"] > len(line["value"])]
    note = ""
    if thinned:
        logged, points = max(line["logged"] for line in thinned), max(len(line["value"]) for line in thinned)
        note = f"Of {logged:,} points, the {points:,} extremes are drawn."
    return tag(
        "figure",
        tag("figcaption", tag("b", chart["title"]), unit, *_key(chart, runs)),
        tag("div", class_="plot"),
        tag("p", class_="broken", hidden=True),
        tag("details", tag("summary", "Values"), tag("p", note, class_="quiet") if note else "", _values(chart, runs)),
        id=f"chart-{position}",
        class_="chart",
    )


def _key(chart: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[Markup]:
    """The legend of a feature's chart: label and colour of each line. Other charts share one legend in the controls."""
    tones = {line["label"]: line["tone"] for line in chart["lines"] if not line["kind"] and line["label"]}
    if len(runs) > 1:  # colours distinguish runs here; within a run, all lines after the first are dotted
        return [tag("span", f" {', '.join(tones)}", class_="of")] if tones else []
    swatches = {
        label: tag("span", class_=f"swatch tone{tone % 8}", aria_hidden="true") for label, tone in tones.items()
    }
    return [tag("span", swatch, f" {label}", class_="key") for label, swatch in swatches.items()]


def _values(chart: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Markup:
    """A table of the curves' values at a few steps, for readers who cannot see or run the chart."""
    columns = []
    for line in chart["lines"]:
        run = runs[line["run"]]
        title = ", ".join(filter(None, (run["name"] if len(runs) > 1 else "", line["label"]))) or chart["title"]
        columns.append((title, dict(zip((run["step"][at] for at in line["at"]), line["value"], strict=True))))
    every = sorted({step for _, values in columns for step in values})
    # Use only steps at which the curve with the fewest values has one: evaluations are rare, and most other rows would
    # show no value for them.
    steps = min((list(values) for _, values in columns if len(values) > 2), key=len, default=every)
    chosen = sorted({every[0], *steps[:: max(1, -(-len(steps) // _ROWS))], every[-1]})
    rows = []
    for step in chosen:
        cells = [values.get(step, "–") for _, values in columns]
        numbers = map(number, cells)  # None for cells that are not numbers
        shown = [
            str(cell) if figure is None else figures.plain(figure) for cell, figure in zip(cells, numbers, strict=True)
        ]
        rows.append([f"{step:,}", *shown])
    return grid(f"{chart['title']} at some of the steps", ["Step", *(title for title, _ in columns)], rows, figures=1)
