"""Builds HTML, escaping every plain string so that text from files cannot become markup."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

VOID = frozenset({"meta", "input", "rect", "br", "img"})


class Markup(str):
    """Text that is HTML already; only `tag`, `join` and the page itself create it."""


def tag(name: str, *children: str, **attributes: str | int | float | bool) -> Markup:
    """`<name attributes>children</name>`; `class_` becomes the attribute `class`, `aria_label` becomes `aria-label`."""
    parts = []
    for key, value in attributes.items():
        if value is not False:
            label = key.rstrip("_").replace("_", "-")
            parts.append(f" {label}" if value is True else f' {label}="{escape(str(value))}"')
    opening = f"<{name}{''.join(parts)}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Concatenate children, escaping those that are not Markup."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, figures: int = 0, stacked: bool = False
) -> Markup:
    """A table that scrolls on its own on a narrow screen.

    Args:
        caption: what the table contains; also the accessible name of the region in which the table scrolls.
        head: column titles.
        rows: rows of cells; the first cell of a row is the row's header.
        figures: index of the first column of numbers; this and later columns are right-aligned; 0 if there are none.
        stacked: on a narrow screen, show each row as a block with its cells below each other.
    """

    def cell(index: int, child: str) -> Markup:
        kind = "figure" if figures and index >= figures else "words"
        if index == 0:
            return tag("th", child, scope="row")
        return tag("td", child, class_=kind, data_title=stacked and head[index])

    titles = [
        tag("th", t, scope="col", class_="figure" if figures and i >= figures else "words") for i, t in enumerate(head)
    ]
    body = [tag("tr", *(cell(i, child) for i, child in enumerate(row))) for row in rows]
    inner = tag("table", tag("caption", tag("span", caption)), tag("thead", tag("tr", *titles)), tag("tbody", *body))
    return tag(
        "div", inner, class_="scroll stacked" if stacked else "scroll", role="region", tabindex=0, aria_label=caption
    )


def embedded(value: object) -> Markup:
    """JSON that is safe inside a script element: `<`, which could end the element or open a comment, is escaped."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
