"""The report page of a run folder: markup, style, script and data in a single file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from shoestring.core.errors import ShoestringError
from shoestring.report import curves, digest, sections
from shoestring.report.charts import charts
from shoestring.report.markup import Markup, embedded, join
from shoestring.report.reading import RunFolder, read
from shoestring.storage.whole import write_atomic

STYLE = ("uplot/uPlot.min.css", "page.css")
SCRIPT = ("uplot/uPlot.iife.min.js", "curves.js", "chart.js", "controls.js")


def write(folder: Path) -> Path:
    """Write `folder/report.html` from what the run has left so far, whole or not at all.

    Returns:
        The page's path.

    Raises:
        ConfigError: `folder` is not a run folder.
        ShoestringError: the page cannot be written.
    """
    run = read(folder)
    return save(run.path / "report.html", document(digest.name(run), *_parts(run)))


def document(title: str, head: Markup, body: Markup, data: dict[str, Any]) -> str:
    """The whole page; its policy lets the two inline parts run, known by their hash, and nothing else load."""
    style = "\n".join(map(_part, STYLE))
    script = "\n".join(
        (f"/* uPlot\n{_part('uplot/LICENSE')}*/", *map(_part, SCRIPT))
    )  # the licence goes with every copy
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        title=join([title]), policy=policy, style=style, script=script, head=head, body=body, data=embedded(data)
    )


def save(path: Path, text: str) -> Path:
    """Write `text` to `path` atomically: a reader never sees half a page, and a full disk leaves the old one."""
    try:
        write_atomic(path, text.encode(errors="replace"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ShoestringError(
            f"cannot write {path}: {reason}", hint="free some space or make the folder writable"
        ) from error
    return path


def _parts(run: RunFolder) -> tuple[Markup, Markup, dict[str, Any]]:
    data = curves.payload([run])
    body = join(
        [
            sections.failure(run),
            sections.headline(run),
            sections.facts(run),
            charts(data),
            sections.where(run),
            sections.reductions(run),
            sections.feature_tables(run),
            sections.features(run),
            sections.ranks(run),
            sections.samples(run),
            sections.starts(run),
            sections.notes(run),
            sections.documents(run),
        ]
    )
    return sections.heading(run), body, data


def _part(name: str) -> str:
    return files("shoestring.report").joinpath("web", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
