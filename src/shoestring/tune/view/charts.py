"""Draws the charts of a study's page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shoestring import figures
from shoestring.report.drawing import HEIGHT, WIDTH, Scale, axes, dot, line, path, picture, scales, stairs, text
from shoestring.report.markup import Markup, tag
from shoestring.tune.settings import Population
from shoestring.tune.space import Dimension
from shoestring.tune.store import TrialLease
from shoestring.tune.view.record import StudyRecord

_CURVES, _LINES = 80, 120
"""Maximum number of trials in the chart by step, and in the chart of settings; if there are more, the best are
drawn."""


def over_time(record: StudyRecord) -> Markup:
    """Draw each trial's last value against the trial's number, and the best result so far."""
    last = {trial.number: _last(record, trial) for trial in record.trials}
    shown = {number: value for number, value in last.items() if value is not None and math.isfinite(value)}
    if not shown:
        return Markup()
    inside = _inside(list(shown.values()), record.sign)
    x, y = scales([0, *shown], inside)
    parts = axes(x, y, "Number of the trial")
    best, running = [], math.inf
    for trial in record.done:
        running = min(running, record.sign * (trial.value or 0.0))
        best.append((x(trial.number), y(record.sign * running)))
    parts.append(path(stairs(best), "best", "Best result so far"))
    for trial in record.trials:
        if (value := shown.get(trial.number)) is not None:
            title = f"trial {trial.number}: {figures.plain(value)}, {trial.state}"
            parts.append(dot(x(trial.number), y(value), trial.state, title))
    beyond = sum(value not in inside for value in shown.values())
    note = f"{beyond} values far worse than the others are drawn at the edge." if beyond else ""
    return _noted(picture(parts, f"{record.study.objective} of each trial, and the best so far"), note)


def parallel(record: StudyRecord) -> Markup:
    """Draw parallel coordinates: a line for each trial with a result, an axis for each setting and the objective."""
    ranked = record.ranked[:_LINES]
    if not ranked or not record.space:
        return Markup()
    values = [trial.value or 0.0 for trial in ranked]
    columns = len(record.space) + 1
    places = [90 + at * (WIDTH - 180) / (columns - 1) for at in range(columns)]
    own = Scale(min(values), max(values), HEIGHT - 40, 30)
    parts = []
    for at, dimension in zip(places, record.space, strict=False):
        parts += [line(at, 30, at, HEIGHT - 40, "rule"), text(at, 16, _short(dimension.key), kind="strong")]
        ends: list[Any] = list(dimension.choices) if dimension.choices else [dimension.low, dimension.high]
        for value in ends:
            shown = figures.plain(value) if isinstance(value, int | float) and not dimension.choices else str(value)
            parts.append(text(at - 6, _height(dimension, value) + 4, shown[:14], anchor="end"))
    parts += [line(places[-1], 30, places[-1], HEIGHT - 40, "rule")]
    parts.append(text(places[-1], 16, _short(record.study.objective), kind="strong"))
    tops = max(1, len(ranked) // 5)
    for rank, trial in reversed(list(enumerate(ranked))):
        points = [
            (round(at, 1), _height(dimension, trial.parameters[dimension.key]))
            for at, dimension in zip(places, record.space, strict=False)
            if dimension.key in trial.parameters
        ]
        kind = "winner" if rank == 0 else "top" if rank < tops else "faint"
        title = f"trial {trial.number}: {figures.plain(trial.value or 0.0)}"
        parts.append(path([*points, (places[-1], own(trial.value or 0.0))], kind, title))
    for value in dict.fromkeys((own.low, own.high)):
        parts.append(text(places[-1] + 8, own(value) + 4, figures.plain(value), anchor="start"))
    note = (
        "The thick line is the best trial, green lines are the best fifth. A setting that does not exist is left out."
    )
    return _noted(picture(parts, "Settings and objective of each trial"), note)


def _height(dimension: Dimension, value: Any) -> float:
    if dimension.choices:
        return Scale(0, max(len(dimension.choices) - 1, 1), HEIGHT - 46, 40)(dimension.index(value))
    return Scale(dimension.low, dimension.high, HEIGHT - 46, 40, log=dimension.kind == "log")(value)


def _short(key: str) -> str:
    return key if len(key) <= 22 else "…" + key[-21:]


def rungs(record: StudyRecord) -> Markup:
    """Draw each trial's objective by step; vertical lines are comparisons, dashed lines lead to forks."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for trial in record.trials:
        pairs = [(step, value) for step, value in record.reports.get(trial.trial, {}).items() if math.isfinite(value)]
        every = -(-len(pairs) // 100) or 1  # draw at most about 100 points of a trial
        if pairs:
            last = len(pairs) - 1
            curves[trial.number] = [pair for at, pair in enumerate(pairs) if at % every == 0 or at == last]
    if not curves or record.schedule is None:
        return Markup()
    ends = sorted(curves, key=lambda number: (-curves[number][-1][0], record.sign * curves[number][-1][1]))[:_CURVES]
    values = [value for number in ends for _, value in curves[number]]
    inside = _inside(values, record.sign)
    x, y = scales([0, *(step for number in ends for step, _ in curves[number])], inside)
    parts = axes(x, y, "Step")
    rung = 0
    while (step := record.schedule.step(rung)) < x.high and rung < 30:
        parts += [line(x(step), 12, x(step), HEIGHT - 40, "rule")]
        rung += 1
    winner = record.ranked[0].number if record.ranked else -1
    by_number = {trial.number: trial for trial in record.trials}
    lineage, number = set[int](), winner
    while number in by_number:
        lineage.add(number)
        number = by_number[number].parent
    for number in reversed(ends):
        trial, points = by_number[number], [(x(step), y(value)) for step, value in curves[number]]
        before = [pair for pair in curves.get(trial.parent, []) if pair[0] <= curves[number][0][0]]
        title = f"trial {number}, {trial.state}" + (f", fork of trial {trial.parent}" if trial.parent >= 0 else "")
        if before:
            parts.append(path([(x(before[-1][0]), y(before[-1][1])), points[0]], "fork", title))
        kind = "winner" if number in lineage else "top" if trial.state == "done" else "faint"
        parts.append(path(points, kind, title))
        parts.append(dot(*points[-1], trial.state, title, radius=3))
    legend = "Upright lines are comparisons; the thick line is the best trial"
    note = f"{legend} and what it descends from." if isinstance(record.schedule, Population) else f"{legend}."
    return _noted(picture(parts, f"{record.study.objective} of each trial by step"), note)


def effort(studies: Sequence[StudyRecord]) -> Markup:
    """Draw each study's best result against hours of work."""
    lines = [(record.study.name, best, record.hours) for record in studies if (best := record.best_so_far())]
    if not lines:
        return Markup()
    values = [value for _, points, _ in lines for _, value in points]
    x, y = scales([0.0, *(hours for *_, hours in lines)], _inside(values, studies[0].sign))
    parts = axes(x, y, "Hours of work, over all workers")
    for at, (name, points, hours) in enumerate(lines):
        drawn = [(x(spent), y(value)) for spent, value in [*points, (hours, points[-1][1])]]
        parts.append(path(stairs(drawn), "best" if at == 0 else "other", name))
        parts.append(text(drawn[-1][0], drawn[-1][1] - 6, name, anchor="end", kind="strong"))
    return picture(parts, "Best result by hours of work")


def _last(record: StudyRecord, trial: TrialLease) -> float | None:
    if trial.value is not None:
        return trial.value
    reports = record.reports.get(trial.trial, {})
    return reports[max(reports)] if reports else None


def _inside(values: Sequence[float], sign: int) -> list[float]:
    """Drop very bad outliers, which would make all other values in a chart look alike."""
    ordered = sorted(sign * value for value in values)
    best, middle = ordered[0], ordered[len(ordered) // 2]
    limit = middle + 4 * (middle - best) if middle > best else ordered[-1]
    return [sign * value for value in ordered if value <= limit]


def _noted(drawn: Markup, note: str) -> Markup:
    return tag("div", drawn, tag("p", note, class_="quiet") if note else Markup())
