"""Numbers the literal texts of the templates, so that a page can be rendered as these numbers and its data.

A page takes the texts from the browser's cache, where they are stored once for all pages. `parts.py` sends the rest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from django.template import engines
from django.template.base import TextNode

FORM_TOKEN = -1
"""Placeholder for the token against forged forms, which differs at each request."""
_TEMPLATES = Path(str(resources.files("shoestring_hub.server"))) / "templates"

Item = int | str
"""Part of a page: the number of a text, `FORM_TOKEN`, or data."""


@dataclass(frozen=True)
class Marks:
    """Marks that stand for texts while a page is rendered. Their prefix is drawn at random for each page, so data
    that somebody has stored earlier cannot contain it."""

    numbered: bool
    """Whether texts are replaced by marks; if not, only the form token is."""
    prefix: str = field(default_factory=lambda: f"\x02{secrets.token_hex(8)}:")

    def mark(self, number: int) -> str:
        """The mark of a text or of the form token."""
        return f"{self.prefix}{number}\x03"

    def split(self, page: str) -> list[Item]:
        """Split a rendered page into numbers of texts, `FORM_TOKEN`, and data."""
        parts = re.split(re.escape(self.prefix) + r"(-?\d+)\x03", page)
        items = [int(part) if index % 2 else part for index, part in enumerate(parts)]
        return [item for item in items if item != ""]


_marks: ContextVar[Marks | None] = ContextVar("marks", default=None)


class TemplateText(TextNode):
    """A text of a template, which renders as its mark while `marked` is in effect."""

    number = 0

    def render_annotated(self, context: Any) -> str:
        """Render the text, or its mark."""
        marks = _marks.get()
        return marks.mark(self.number) if marks and marks.numbered else self.s


@cache
def texts() -> tuple[str, ...]:
    """All texts of all templates, sorted; the position of a text is its number."""
    engine = engines["django"].engine
    names = sorted(path.relative_to(_TEMPLATES).as_posix() for path in _TEMPLATES.rglob("*.html"))
    nodes: list[Any] = [
        node for name in names for node in engine.get_template(name).nodelist.get_nodes_by_type(TextNode)
    ]
    ordered = tuple(sorted({node.s for node in nodes}))
    numbers = {text: number for number, text in enumerate(ordered)}
    for node in nodes:  # in place: Django caches the nodes that it has parsed
        node.__class__, node.number = TemplateText, numbers[node.s]
    return ordered


@contextmanager
def marked(*, numbered: bool) -> Iterator[Marks]:
    """Context in which pages are rendered with marks in place of the form token and, if `numbered`, of texts."""
    texts()
    marks = Marks(numbered)
    token = _marks.set(marks)
    try:
        yield marks
    finally:
        _marks.reset(token)


def form_token_mark() -> str:
    """The mark of the form token while `marked` is in effect; otherwise empty."""
    marks = _marks.get()
    return marks.mark(FORM_TOKEN) if marks else ""


def whole(items: Sequence[Item], form_token: str) -> str:
    """Join the items of a page to its HTML."""
    known = texts()
    return "".join(
        item if isinstance(item, str) else form_token if item == FORM_TOKEN else known[item] for item in items
    )
