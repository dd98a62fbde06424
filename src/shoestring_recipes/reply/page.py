"""Writes a page of messages with their best replies as animated clips: one file that loads no other."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.markup import Markup, tag

STYLE = """
.message { margin-top: 1.75rem; }
.replies {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: .9rem;
  margin: 0; padding: 0; list-style: none;
}
.replies figure { margin: 0; }
.replies img { display: block; width: 96px; height: 96px; object-fit: cover; }
.replies img { border: 1px solid var(--rule); border-radius: .5rem; background: #fff; }
"""
_LIMIT = 16 << 20
"""Maximum size of all clips of a page in bytes."""


class Reply(NamedTuple):
    """A clip among the replies to a message."""

    name: str
    clip: bytes
    """A GIF or WebP file."""
    score: float


def save_page(path: Path, messages: Sequence[str], replies: Sequence[Sequence[Reply]], credit: str = "") -> Path:
    """Write the page; returns its path.

    Args:
        replies: the replies to each message, the best first.
        credit: who made the clips, if that has to be named.
    """
    room, sections = _LIMIT, []
    for message, row in zip(messages, replies, strict=True):
        items = []
        for place, reply in enumerate(row, 1):
            room -= len(reply.clip)
            shown = tag("p", "The page has no room for this clip.")
            if room >= 0:
                kind = "gif" if reply.clip.startswith(b"GIF8") else "webp"
                source = f"data:image/{kind};base64,{base64.b64encode(reply.clip).decode()}"
                shown = tag("img", src=source, alt=f"Reply {place}: {reply.name}", width=96, height=96)
            caption = tag("figcaption", f"{reply.name}, {reply.score:.2f}")
            items.append(tag("li", tag("figure", shown, caption)))
        heading = tag("h2", message[:500] + ("…" if len(message) > 500 else ""))
        sections.append(tag("section", heading, tag("ol", *items, class_="replies"), class_="message"))
    intro = "The best replies come first. The figure is the cosine of message and reply, at most 1."
    head = tag("div", tag("h1", "Replies"), tag("p", intro, class_="quiet"), class_="title")
    frame = PageFrame(packaged("shoestring.report", "page.css") + STYLE, "", credit)
    return save(path, document("Replies", head, Markup("".join(sections)), {}, frame))
