"""Figures that pages quote: the text of a link to a row may only have numbers that the row has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.rows import Row
from shoestring.core.errors import DataError

_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*evidence\.md#([\w.-]+)\)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def pages() -> list[Path]:
    """The pages that people read: the README, the documents and the method cards, but not those made of the rows."""
    found = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]
    return [path for path in found if path.name not in {"comparisons.md", "evidence.md"}]


def check_quoted(rows: Mapping[str, Row]) -> None:
    """Check every page against the rows, by id.

    Raises:
        DataError: a page links to a row that does not exist, or quotes a number that the row does not have.
    """
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in pages() for fault in faults_of(path.read_text(), rows)]
    if faults:
        hint = "quote the row's own figures (`measured`, its interval, or its note), rounded as you like"
        raise DataError("; ".join(faults), hint=hint)


def faults_of(text: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """What is wrong with the quotations of one page."""
    for link in _LINK.finditer(text):
        quoted, name = link.groups()
        if name not in rows:
            yield f"no row is called `{name}`"
            continue
        wrong = [number for number in _numbers(quoted) if not _is_quoted(number, _figures(rows[name]))]
        if wrong:
            yield f"`{name}` does not have {', '.join(wrong)} (it measured {rows[name].measured})"


def _numbers(text: str) -> list[str]:
    return [number.replace(",", "") for number in _NUMBER.findall(text)]


def _figures(row: Row) -> list[float]:
    """All numbers of a row, without their signs: a text says "0.4 less" of a difference of -0.4."""
    measured = [] if row.measured is None else [row.measured, *(row.interval or ())]
    return [*map(abs, measured), *map(float, _numbers(f"{row.reason} {row.baseline} {row.what}"))]


def _is_quoted(number: str, figures: list[float]) -> bool:
    """Whether a number is one of the figures, as many digits as it has; also as a share in percent, or inverted."""
    digits = len(number.partition(".")[2])
    forms = (form for figure in figures for form in (figure, 100 * figure, 1 / figure if figure else 0.0))
    return any(f"{form:.{digits}f}" == number for form in forms)
