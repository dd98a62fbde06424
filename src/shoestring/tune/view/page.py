"""Writes the page of one study, with a comparison to other studies: one HTML file that works offline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from shoestring import figures
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.drawing import WIDTH, Scale, line, path, picture, text
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.tune.settings import Population
from shoestring.tune.store import TrialLease
from shoestring.tune.view.charts import effort, over_time, parallel, rungs
from shoestring.tune.view.importance import importances
from shoestring.tune.view.record import StudyRecord

_ROWS = 200


def write(studies: Sequence[StudyRecord], out: Path) -> Path:
    """Write the page of the first study, with the hours that every study in `studies` took to reach the same result.

    Raises:
        ShoestringError: the page cannot be written.
    """
    record = studies[0]
    states = [trial.state for trial in record.trials]
    facts = {
        "Trials": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none",
        "Work": f"{record.hours:.2f} h",
        "Tokens": figures.count(sum(trial.tokens for trial in record.trials)),
        "Sampler": record.study.sampler,
        "Interruptions": f"{sum(max(trial.epoch - 1 - trial.rung + trial.forked, 0) for trial in record.trials):,}",
    }
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    parts = [
        _headline(record),
        tag("dl", *rows, class_="facts"),
        _section("Trials over time", over_time(record), _STATES),
        _section("Settings", parallel(record)),
        _importance(record),
        _section("Lineages" if isinstance(record.schedule, Population) else "Rungs", rungs(record)),
        _section("Hours of work to a result", effort(studies), _to_target(studies)),
        _table(record),
    ]
    name = f"Study {record.study.name}"
    return save(out, document(name, tag("div", tag("h1", name), class_="title"), join(parts), {}, _frame()))


@cache
def _frame() -> PageFrame:
    style = (packaged("shoestring.report", "page.css"), packaged("shoestring.tune.view", "study.css"))
    script = (packaged("shoestring.report", "elements.js"), packaged("shoestring.tune.view", "study.js"))
    return PageFrame("\n".join(style), "\n".join(script))


_STATES = tag(
    "p",
    *(
        tag("span", tag("b", "● ", class_=tone), state)
        for tone, state in (
            ("tone0", "result"),
            ("tone1", "ended early"),
            ("bad", "failed"),
            ("tone2", "still running"),
        )
    ),
    class_="legend quiet",
)


def _section(title: str, *parts: Markup) -> Markup:
    shown = [part for part in parts if part]
    return tag("section", tag("h2", title), *shown) if shown and parts[0] else Markup()


def _headline(record: StudyRecord) -> Markup:
    if not record.ranked:
        return tag("p", "No trial has a result yet.", class_="verdict")
    best = record.ranked[0]
    number = tag("span", figures.plain(best.value or 0.0), class_="number")
    settings = tag("p", settings_of(best), class_="verdict")
    label = tag(
        "p", f"{record.study.objective} of trial {best.number}, the best of {len(record.done)} results", class_="of"
    )
    return tag("section", tag("div", number, label), settings, class_="headline")


def settings_of(trial: TrialLease) -> str:
    """Format the settings of a trial in one line."""
    shown = {
        key: figures.plain(value) if isinstance(value, float) else value for key, value in trial.parameters.items()
    }
    return ", ".join(f"{key} = {value}" for key, value in shown.items())


def _importance(record: StudyRecord) -> Markup:
    if isinstance(record.schedule, Population):
        return Markup()  # a fork's result also depends on the settings of its ancestors
    values = [record.sign * (trial.value or 0.0) for trial in record.done]
    rows = importances(record.space, [trial.parameters for trial in record.done], values)
    if not rows:
        return Markup()
    scale, height = Scale(0.0, max(1.0, *(row.high for row in rows)), 250, WIDTH - 20), 30 * len(rows) + 30
    parts = [line(scale(tick), 4, scale(tick), height - 24, "rule") for tick in scale.ticks()]
    parts += [text(scale(tick), height - 6, figures.percent(tick)) for tick in scale.ticks()]
    for at, row in enumerate(rows):
        y = 20 + 30 * at
        parts.append(text(240, y + 4, row.key, anchor="end", kind="strong"))
        parts.append(path([(scale(0.0), y), (scale(row.mean), y)], "bar"))
        low, high = figures.percent(row.low), figures.percent(row.high)
        title = f"{row.key}: {figures.percent(row.mean)}, from {low} to {high}"
        parts.append(path([(scale(row.low), y), (scale(row.high), y)], "interval", title))
    note = (
        "Part of the variance of the results that remains when all other settings are fixed (total effect), by a "
        "Gaussian process. The thin line is the 90% interval over random subsets of the results. Parts may add up to "
        "more than one."
    )
    return _section("Importance", picture(parts, "Importance of each setting", height), tag("p", note, class_="quiet"))


def _to_target(studies: Sequence[StudyRecord]) -> Markup:
    """Make a table of the hours in which each study reached a target: the best result of the study that did worst."""
    usable = [record for record in studies if record.best_so_far()]
    if len(usable) < 2:
        advice = (
            "Name a study of random search beside this one to compare them: shoestring tune page tune.toml random.toml"
        )
        return tag("p", advice, class_="quiet")
    sign = usable[0].sign
    target = max(sign * record.best_so_far()[-1][1] for record in usable)
    rows = []
    for record in usable:
        reached = next(spent for spent, best in record.best_so_far() if sign * best <= target)
        rows.append([record.study.name, record.study.sampler, f"{reached:.3g}", f"{record.hours:.3g}"])
    head = ("Study", "Sampler", "Hours to the target", "Hours in all")
    return grid(f"Target: {figures.plain(sign * target)}, which all of them reached", head, rows, figures=2)


def _table(record: StudyRecord) -> Markup:
    unranked = [trial for trial in record.trials if trial.state != "done"]
    shown = [*record.ranked, *unranked][:_ROWS]
    rows = [
        [
            f"{trial.number}",
            settings_of(trial),
            f"{trial.state}, fork of {trial.parent}" if trial.parent >= 0 else trial.state,
            trial.note,
            "–" if trial.value is None else figures.plain(trial.value),
            f"{trial.step:,}",
            figures.duration(trial.seconds),
        ]
        for trial in shown
    ]
    head = ("Trial", "Settings", "State", "Note", record.study.objective, "Steps", "Work")
    caption = f"The best first; {len(record.trials) - len(shown):,} more are not shown" if len(shown) == _ROWS else ""
    return _section("Trials", grid(caption or "The best first", head, rows, figures=4, stacked=True))
