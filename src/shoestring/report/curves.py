"""Metrics as the charts take them: what is drawn together, in which order, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from shoestring.report import digest
from shoestring.report.folder import RunFolder, tables

LARGE, SMALL = 4000, 1200  # points kept of a curve, in a large chart and in a small one
TREND = 250  # a curve of twice as many points gets their means drawn over it
LETTERS = "AB"
TONES = 4  # colours of lines that page.css has

_MAIN = {
    "bits": ("Bits per byte", "bits_per_byte", "held_out_bits_per_byte"),
    "nats": ("Loss, nats per token", "loss", "held_out_loss"),
}
_UNITS = {"mb": "MB", "kb": "kB", "gib": "GiB", "s": "seconds", "seconds": "seconds"}
_KNOWN = {  # metric: title, unit, format
    "tokens_per_second": ("Speed", "tokens per second", "count"),
    "memory_gib": ("Memory", "GiB", "plain"),
    "lr": ("Learning rate", "", "plain"),
    "grad_norm": ("Gradient norm", "", "plain"),
    "step_seconds": ("Time of a step", "seconds", "plain"),
    "data_wait": ("Waiting for data", "share of the step", "percent"),
    "mfu": ("Model FLOP utilisation", "share of the peak", "percent"),
}


def payload(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """What the page's script draws: {"large": charts, "small": charts, "tokens": whether tokens can be the x axis}.

    A chart is {"key", "title", "unit", "format", "lines", "marks"}; a line {"label", "tone", "style", "logged",
    "step", "seconds", "tokens", "value"} with equally long lists. A value that is not finite is its name as text.
    """
    large = [_large(key, runs) for key in _MAIN]
    added = {str(row.get("title")): row for run in runs for row in tables(run.summary, "shown") if _has_lines(row)}
    taken = {metric for _, *metrics in _MAIN.values() for metric in metrics} | {"time", "tokens"}
    taken |= {metric for row in added.values() for metric in row["metrics"]}
    found = {metric for run in runs for metric in run.columns} - taken
    order = [metric for metric in _KNOWN if metric in found] + sorted(found - set(_KNOWN))
    charts = {
        "large": [chart for chart in large if chart["lines"]],
        "small": [_small(metric, runs) for metric in order]
        + [chart for row in added.values() if (chart := _added(row, runs))["lines"]],
    }
    lines = [line for group in charts.values() for chart in group for line in chart["lines"]]
    return charts | {"tokens": bool(lines) and all(None not in line["tokens"] for line in lines)}


def thin(values: Sequence[float], limit: int) -> list[int]:
    """Indices of at most `limit` values that keep the curve's shape.

    The values are cut into equal stretches; of each, the lowest, the highest and the first that is not finite
    stay, and of the whole the first and the last: all of them are values that were logged, none an average.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for stretch in _stretches(len(values), max(1, (limit - 2) // 3)):
        finite = [index for index in stretch if math.isfinite(values[index])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if not math.isfinite(values[index])))
    return sorted(kept)


def _stretches(length: int, number: int) -> Iterator[range]:
    return (range(part * length // number, (part + 1) * length // number) for part in range(number))


def _large(key: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    title, training, held_out = _MAIN[key]
    lines = []
    for position, run in enumerate(runs):
        prefix = f"{LETTERS[position]} " if len(runs) > 1 else ""
        tones = (position, position) if len(runs) > 1 else (0, 1)
        lines += _lines(run, training, f"{prefix}training", tones[0], "thin", LARGE)
        lines += _lines(run, held_out, f"{prefix}held out", tones[1], "dots", LARGE)
    marks = [{"label": label, "value": value} for label, value in digest.baselines(runs[0]).items()]
    chart = {"key": key, "title": title, "unit": "", "format": "plain", "marks": marks if key == "bits" else []}
    return chart | {"lines": lines}


def _small(metric: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    title, unit, form = _KNOWN.get(metric) or (*_named(metric), "plain")
    lines = []
    for position, run in enumerate(runs):
        lines += _lines(run, metric, LETTERS[position] if len(runs) > 1 else title.lower(), position, "solid", SMALL)
    return {"key": metric, "title": title, "unit": unit, "format": form, "marks": [], "lines": lines}


def _has_lines(row: dict[str, Any]) -> bool:
    """Whether a row of what features show is a curve; a damaged one is left out, and its metrics drawn alone."""
    return row.get("as") == "curve" and isinstance(row.get("metrics"), dict)


def _added(row: dict[str, Any], runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The chart that a feature adds; a tone for each of its lines, or for each of several runs."""
    lines = []
    for position, run in enumerate(runs):
        for index, (metric, label) in enumerate(row["metrics"].items()):
            prefix = f"{LETTERS[position]} " if len(runs) > 1 else ""
            tone = (position if len(runs) > 1 else index) % TONES
            lines += _lines(run, metric, f"{prefix}{label}", tone, "solid", SMALL)
    head = {"key": f"{row.get('feature')}: {row.get('title')}", "title": str(row.get("title", ""))}
    return head | {"unit": str(row.get("unit", "")), "format": "plain", "marks": [], "lines": lines}


def _named(metric: str) -> tuple[str, str]:
    """Title and unit of a number that a feature publishes: `wire_mb` is ("Wire", "MB")."""
    name, _, last = metric.rpartition("_")
    title = (name if last in _UNITS and name else metric).replace("_", " ")
    return title[:1].upper() + title[1:], _UNITS.get(last, "") if name else ""


def _lines(run: RunFolder, metric: str, label: str, tone: int, style: str, limit: int) -> list[dict[str, Any]]:
    """The curve as it was logged, and over a long one, drawn faint, the means of its stretches; none without values."""
    column = run.columns.get(metric, {})
    steps, values = list(column), list(column.values())
    if len(values) < 2 * TREND:
        kept = thin(values, limit)
        return [_line(run, label, tone, style, kept, steps, values)] if values else []
    stretches = list(_stretches(len(values), TREND))
    means = [fmean(values[each.start : each.stop]) for each in stretches]
    middles = [steps[(each.start + each.stop) // 2] for each in stretches]
    trend = f"{label}, mean of {len(values) // TREND} values"
    return [
        _line(run, label, tone, "faint", thin(values, limit), steps, values),
        _line(run, trend, tone, "solid" if style == "thin" else style, range(TREND), middles, means),
    ]


def _line(
    run: RunFolder, label: str, tone: int, style: str, kept: Sequence[int], steps: list[int], values: list[float]
) -> dict[str, Any]:
    times = run.columns.get("time", {})
    start = next(iter(times.values()), 0.0)
    return {
        "label": label,
        "tone": tone,
        "style": style,
        "logged": len(values),
        "step": [steps[index] for index in kept],
        "seconds": [_since(times.get(steps[index]), start) for index in kept],
        "tokens": [digest.tokens_at(run, steps[index]) for index in kept],
        "value": [_shown(values[index]) for index in kept],
    }


def _since(time: float | None, start: float) -> float | None:
    elapsed = None if time is None else time - start
    return round(elapsed, 2) if elapsed is not None and math.isfinite(elapsed) else None


def _shown(value: float) -> float | str:
    """Six significant digits are more than a screen shows; what JSON cannot hold goes as its name."""
    return float(f"{value:.6g}") if math.isfinite(value) else {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
