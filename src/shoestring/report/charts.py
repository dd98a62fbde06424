"""The markup of the charts, which the page's script draws: for each a title, a canvas and a table of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoestring.report import figures
from shoestring.report.markup import Markup, tag
from shoestring.report.markup import table as grid
from shoestring.report.reading import number

_ROWS = 12  # of a table of values


def charts(data: dict[str, Any]) -> Markup:
    """Controls, large charts and small ones, for the payload of `curves`; empty without curves."""
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
    kept = max((len(line["value"]) for line in thinned), default=0)
    note = f"Of {max(line['logged'] for line in thinned):,} points, the {kept:,} extremes are drawn." if thinned else ""
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
    """The colours of the lines of a feature's chart; what others have is among the controls."""
    own = {line["label"]: line["tone"] for line in chart["lines"] if not line["kind"] and line["label"]}
    if len(runs) > 1:  # colours tell the runs apart, and all but the first line of each is dotted
        return [tag("span", f" {', '.join(own)}", class_="of")] if own else []
    swatches = {label: tag("span", class_=f"swatch tone{tone % 8}", aria_hidden="true") for label, tone in own.items()}
    return [tag("span", swatch, f" {label}", class_="key") for label, swatch in swatches.items()]


def _values(chart: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Markup:
    """The curves at a few steps, for whoever cannot see or run the chart."""
    columns = []
    for line in chart["lines"]:
        run = runs[line["run"]]
        title = ", ".join(filter(None, (run["name"] if len(runs) > 1 else "", line["label"]))) or chart["title"]
        columns.append((title, dict(zip((run["step"][at] for at in line["at"]), line["value"], strict=True))))
    every = sorted({step for _, values in columns for step in values})
    # steps at which the sparsest curve has a value: evaluations are rare, and rows without them say little
    steps = min((list(values) for _, values in columns if len(values) > 2), key=len, default=every)
    chosen = sorted({every[0], *steps[:: max(1, -(-len(steps) // _ROWS))], every[-1]})
    rows = [[f"{step:,}", *(_cell(values.get(step)) for _, values in columns)] for step in chosen]
    return grid(f"{chart['title']} at some of the steps", ["Step", *(title for title, _ in columns)], rows, figures=1)


def _cell(value: float | str | None) -> str:
    figure = number(value)
    return "–" if value is None else str(value) if figure is None else figures.plain(figure)
