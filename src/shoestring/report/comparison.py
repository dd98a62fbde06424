"""Compares runs: shows the settings that differ, the results, and the curves in common charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.report import curves, digest, page
from shoestring.report.charts import charts
from shoestring.report.document import document, save
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.reading import RunFolder, flat, read

_ABSENT = "–"


def compare(folders: Sequence[Path], out: Path) -> tuple[str, Path]:
    """Compare the runs in two or more `folders`, and write the comparison page to `out`.

    Returns:
        A summary for the terminal (final figures, settings and versions that differ), and the page's path.

    Raises:
        ConfigError: there are fewer than two folders, a folder is given twice, or a folder is not a run folder.
        ShoestringError: the page cannot be written.
    """
    if len(folders) < 2:
        raise ConfigError("comparing takes at least two run folders", hint="shoestring compare runs/a runs/b")
    runs = [read(Path(folder)) for folder in folders]
    places = [run.path.resolve() for run in runs]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(f"`{place}` is given twice", hint="give folders of different runs")
    names = digest.labels(runs)
    versions = [flat({key: run.environment.get(key, {}) for key in ("versions", "git")}) for run in runs]
    results = [digest.results(run) for run in runs]
    figure_rows = [
        [label, *(_format(label, figures_of_run, results[0]) for figures_of_run in results)]
        for label in dict.fromkeys(label for figures_of_run in results for label in figures_of_run)
    ]
    blocks = (
        (
            "Results",
            "Final figures; changes are from the first run, of shares in percentage points.",
            figure_rows,
        ),
        ("Settings that differ", "From the resolved run files.", _differences([flat(run.settings) for run in runs])),
        ("Versions that differ", "From what each run wrote about its environment.", _differences(versions)),
    )
    text = [f"{_printable(name)}: {_state(run)}" for name, run in zip(names, runs, strict=True)]
    parts: list[Markup] = []
    for title, caption, rows in blocks:
        text += ["", title, *_align([("", *names), *rows] if rows else [("none",)])]
        shown = grid(caption, ("", *names), rows) if rows else tag("p", "None.", class_="quiet")
        parts.append(tag("section", tag("h2", title), shown, class_="wide"))
    return "\n".join(text) + "\n", save(Path(out), _page(runs, names, parts))


def _state(run: RunFolder) -> str:
    return f"{_printable(digest.status(run))}, {digest.last_step(run):,} steps"


def _page(runs: Sequence[RunFolder], names: Sequence[str], parts: Sequence[Markup]) -> str:
    data = curves.payload(runs)
    title = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) <= 4 else f"{len(names)} runs"
    states = [
        tag(
            "li",
            tag("span", class_=f"swatch tone{position % 8}", aria_hidden="true"),
            tag("b", name),
            f" {_state(run)}",
        )
        for position, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    head = tag("div", tag("h1", f"Comparison of {title}"), tag("ul", *states, class_="runs"), class_="title")
    body = join([parts[0], charts(data), *parts[1:]])
    return document(f"Comparison of {title}", head, body, data, page.frame())


def _differences(documents: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Table rows for the keys whose values differ: the key, then its value in each document, in order of appearance."""
    keys = dict.fromkeys(key for document in documents for key in document)
    rows = [[key, *(document.get(key, _ABSENT) for document in documents)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _format(label: str, results: Mapping[str, float], first: Mapping[str, float]) -> str:
    """Format a figure with its unit; for all runs but the first, the change from the first run is appended."""
    value = results.get(label)
    if value is None:
        return _ABSENT
    is_share = label.startswith(("share", "MFU"))
    if label == "time":
        text = figures.duration(value)
    elif is_share:
        text = figures.percent(value)
    else:
        text = figures.count(value) if value >= 10_000 else figures.plain(value)
    change = "" if results is first else _change(first.get(label), value, is_share)
    return f"{text} ({change})" if change else text


def _change(first: float | None, value: float, is_share: bool) -> str:
    """Text for the change from the first run: in percent, for shares in percentage points, or "equal"."""
    if first == value:
        return "equal"
    if first is None or not math.isfinite(first) or not math.isfinite(value):
        return ""
    if is_share:
        return f"{100 * (value - first):+.2g} points"
    if not first:
        return ""
    ratio = value / first - 1
    return f"{100 * ratio:+.3g}%" if abs(ratio) < 10 else f"x{value / first:.3g}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a plain-text table, with columns padded to equal width."""
    clean = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*clean, strict=True)]
    padded = (zip(row, widths, strict=True) for row in clean)
    return [("  " + "  ".join(f"{cell:<{width}}" for cell, width in cells)).rstrip() for cells in padded]


def _printable(text: str) -> str:
    """Replace characters that could control the terminal, because the text comes from files."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
