"""Writes the report page of a run folder: markup, style, script and data in one file that loads no others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from shoestring.report import curves, digest, sections
from shoestring.report.charts import charts
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.markup import Markup, join
from shoestring.report.reading import RunFolder, read

STYLE = ("uplot/uPlot.min.css", "page.css")
SCRIPT = ("uplot/uPlot.iife.min.js", "elements.js", "curves.js", "chart.js", "controls.js")
FOOTER = "uPlot draws the charts; its licence (MIT) stands in the script."


def write(folder: Path) -> Path:
    """Write `folder/report.html` atomically, from the files that the run has written so far.

    Returns:
        The page's path.

    Raises:
        ConfigError: `folder` is not a run folder.
        ShoestringError: the page cannot be written.
    """
    run = read(folder)
    return save(run.path / "report.html", document(digest.name(run), *_parts(run), frame()))


@cache
def frame() -> PageFrame:
    """The style, script and footer for pages with charts."""
    script = (f"/* uPlot\n{_part('uplot/LICENSE')}*/", *map(_part, SCRIPT))  # every copy must contain the licence
    return PageFrame("\n".join(map(_part, STYLE)), "\n".join(script), FOOTER)


def _part(name: str) -> str:
    return packaged("shoestring.report", name)


def _parts(run: RunFolder) -> tuple[Markup, Markup, dict[str, Any]]:
    data = curves.payload([run])
    body = join(
        [
            sections.failure(run),
            sections.headline(run),
            sections.facts(run),
            charts(data),
            sections.findings(run),
            sections.where(run),
            sections.reductions(run),
            sections.feature_tables(run),
            sections.features(run),
            sections.ranks(run),
            sections.samples(run),
            sections.starts(run),
            sections.notes(run),
            sections.pages(run),
            sections.documents(run),
        ]
    )
    return sections.heading(run), body, data
