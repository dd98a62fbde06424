"""Data of the report's charts: groups metrics into charts, orders the charts, and thins curves for the screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoestring.report import digest
from shoestring.report.reading import RunFolder, arrays, tables, values_at

LARGE, SMALL = 2000, 600  # maximum points per curve in a large and in a small chart
MEANS = 500  # number of intervals of a thinned curve; the page smooths the means over these intervals

_MAIN = {
    "bits": ("Bits per byte", "bits_per_byte", "held_out_bits_per_byte"),
    "nats": ("Loss, nats per {}", "loss", "held_out_loss"),
}
_UNITS = {"mb": "MB", "kb": "kB", "gib": "GiB", "s": "seconds", "seconds": "seconds"}
_KNOWN = {  # metric: title, unit, format
    "tokens_per_second": ("Speed", "tokens per second", "count"),
    "samples_per_second": ("Speed", "samples per second", "count"),
    "memory_gib": ("Memory", "GiB", "plain"),
    "lr": ("Learning rate", "", "plain"),
    "grad_norm": ("Gradient norm", "", "plain"),
    "step_seconds": ("Time of a step", "seconds", "plain"),
    "data_wait": ("Waiting for data", "share of the step", "percent"),
    "mfu": ("Model FLOP utilisation", "share of the peak", "percent"),
    "wire_mb": ("Sent by a rank", "MB a step", "plain"),
    "exposed_seconds": ("Exposed communication", "seconds a step", "plain"),
    "residual": ("Residual", "2-norm", "plain"),
}
_EXACT = frozenset({"lr"})  # never smoothed: a schedule has no noise, and smoothing would distort it


def payload(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The data that the page's script draws: {"runs", "large": charts, "small": charts, "tokens": bool}.

    "tokens" is whether every run has token counts, so that they can be the x axis. A run is {"name", "step",
    "seconds", "tokens"}; the last three are lists of equal length, with an entry for each step at which a curve of the
    run has a point. A chart is {"key", "title", "unit", "format", "smooth", "marks", "lines"}. A line is {"run",
    "kind", "label", "tone", "logged", "at", "value"}, where `at` holds indices into the lists of the line's run, and
    `tone` is the line's colour if there is only one run. Infinities and NaN are written as text. A thinned line also
    has {"means": {"at", "value"}}.
    """
    large = [_large(key, runs) for key in _MAIN]
    # The page opens with the first chart, so the chart with the most logged values comes first.
    large.sort(key=lambda chart: sum(line["logged"] for line in chart["lines"]), reverse=True)
    added = {
        str(row.get("title")): row
        for run in runs
        for row in tables(run.summary, "report_items")
        if row.get("as") == "curve" and isinstance(row.get("metrics"), dict)  # skip damaged rows
    }
    drawn = {metric for _, *metrics in _MAIN.values() for metric in metrics} | {"time", "tokens"}
    drawn |= {metric for row in added.values() for metric in row["metrics"]}
    others = {metric for run in runs for metric in run.columns} - drawn
    order = [metric for metric in _KNOWN if metric in others] + sorted(others - set(_KNOWN))
    charts = {
        "large": [chart for chart in large if chart["lines"]],
        "small": [_small(metric, runs) for metric in order]
        + [chart for row in added.values() if (chart := _feature_chart(row, runs))["lines"]],
    }
    lines = [line for group in charts.values() for chart in group for line in chart["lines"]]
    axes = [
        _axes(run, name, [line for line in lines if line["run"] == position])
        for position, (run, name) in enumerate(zip(runs, digest.labels(runs), strict=True))
    ]
    return {"runs": axes} | charts | {"tokens": bool(lines) and all(None not in axis["tokens"] for axis in axes)}


def thin(values: Sequence[float] | np.ndarray, limit: int) -> list[int]:
    """Indices of at most `limit` values that keep the curve's shape.

    The values are divided into equal intervals. The result includes the lowest, the highest and the first non-finite
    value of each interval, and the first and last of all values. Every drawn point is a logged value, not an average.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    array = np.asarray(values, np.float64)
    starts, labels = _stretches(len(array), max(1, (limit - 2) // 3))
    finite = np.isfinite(array)
    lowest = np.minimum.reduceat(np.where(finite, array, np.inf), starts)
    highest = np.maximum.reduceat(np.where(finite, array, -np.inf), starts)
    chosen = [np.array([0, len(array) - 1])]
    for wanted in (finite & (array == lowest[labels]), finite & (array == highest[labels]), ~finite):
        places = np.flatnonzero(wanted)
        chosen.append(places[np.unique(labels[places], return_index=True)[1]])  # the first one in each interval
    return np.unique(np.concatenate(chosen)).tolist()


def _stretches(length: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide `length` indices into at most `number` equal intervals; returns the first index of each interval, and the
    interval of each index."""
    starts = np.arange(min(number, length)) * length // min(number, length)
    return starts, np.repeat(np.arange(len(starts)), np.diff(np.append(starts, length)))


def _means(steps: Sequence[int] | np.ndarray, values: np.ndarray) -> dict[str, list[Any]]:
    """The mean of the finite values in each interval, placed at the middle step of the interval."""
    places = np.flatnonzero(np.isfinite(values))
    _, labels = _stretches(len(values), MEANS)
    _, first, counts = np.unique(labels[places], return_index=True, return_counts=True)
    if not len(places):
        return {"at": [], "value": []}
    with np.errstate(over="ignore"):
        means = np.add.reduceat(values[places], first) / counts
    middles = places[first + counts // 2]
    return {"at": [int(steps[place]) for place in middles], "value": [_as_json(float(mean)) for mean in means]}


def _large(key: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    title, training, held_out = _MAIN[key]
    title = title.format(" or ".join(sorted({digest.counted(run) for run in runs}, reverse=True)))
    lines = []
    for position, run in enumerate(runs):
        lines += _line(run, position, training, LARGE, kind="training")
        lines += _line(run, position, held_out, LARGE, kind="held out", tone=1)
    marks = [{"label": label, "value": value} for label, value in digest.baselines(runs[0]).items()]
    chart = {"key": key, "title": title, "unit": "", "format": "plain", "smooth": True}
    return chart | {"marks": marks if key == "bits" else [], "lines": lines}


def _small(metric: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The chart of one metric; the name of an unknown metric yields title and unit: `copied_mb` is "Copied" in MB."""
    name, _, last = metric.rpartition("_")
    words = (name if last in _UNITS and name else metric).replace("_", " ")
    own = (words[:1].upper() + words[1:], _UNITS.get(last, "") if name else "", "plain")
    title, unit, form = _KNOWN.get(metric, own)
    lines = [line for position, run in enumerate(runs) for line in _line(run, position, metric, SMALL)]
    chart = {"key": metric, "title": title, "unit": unit, "format": form, "smooth": metric not in _EXACT}
    return chart | {"marks": [], "lines": lines}


def _feature_chart(row: dict[str, Any], runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The chart that a feature adds, with a line for each of its metrics in each run."""
    lines = []
    for position, run in enumerate(runs):
        for tone, (metric, label) in enumerate(row["metrics"].items()):
            lines += _line(run, position, metric, SMALL, label=str(label), tone=tone)
    head = {"key": f"{row.get('feature')}: {row.get('title')}", "title": str(row.get("title", ""))}
    head |= {"unit": str(row.get("unit", "")), "format": "plain", "smooth": True}
    return head | {"marks": [], "lines": lines}


def _line(
    run: RunFolder, position: int, metric: str, limit: int, *, kind: str = "", label: str = "", tone: int = 0
) -> list[dict[str, Any]]:
    """A list with the line of one metric, which has means if it is thinned; empty if the run lacks the metric.

    Here `at` holds steps; `_axes` later converts them to indices.
    """
    steps, values = arrays(run.columns.get(metric, {}))
    if not len(values):
        return []
    indices = thin(values, limit)
    line: dict[str, Any] = {"run": position, "kind": kind, "label": label or kind, "tone": tone}
    line["logged"] = len(values)
    line["at"] = [int(steps[index]) for index in indices]
    line["value"] = [_as_json(value) for value in values[indices].tolist()]
    if len(indices) < len(values):
        line["means"] = _means(steps, values)
    return [line]


def _axes(run: RunFolder, name: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The x values of a run at all steps where its lines have points; also converts `at` in the lines to indices."""
    parts = [part for line in lines for part in (line, line.get("means")) if part]
    steps = sorted({step for part in parts for step in part["at"]})
    index = {step: position for position, step in enumerate(steps)}
    for part in parts:
        part["at"] = [index[step] for step in part["at"]]
    times = run.columns.get("time", {})
    start = next(iter(times.values()), 0.0)
    elapsed = (values_at(times, steps) - start).tolist()
    return {
        "name": name,
        "step": steps,
        "seconds": [round(seconds, 2) if math.isfinite(seconds) else None for seconds in elapsed],
        "tokens": digest.tokens_at(run, steps),
    }


def _as_json(value: float) -> float | str:
    """Round to six significant digits, more than a screen shows; infinities and NaN, which JSON lacks, become text."""
    return float(f"{value:.6g}") if math.isfinite(value) else {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
