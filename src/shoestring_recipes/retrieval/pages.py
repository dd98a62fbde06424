"""Reads texts from plain files and from HTML pages, also compressed ones."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from shoestring.core.errors import DataError
from shoestring.storage import foreign

LARGEST = 16 << 20
"""Maximum size of a file in bytes."""
_SPACE = re.compile(r"\s+")
_PARAGRAPHS = {"p", "li", "dd", "td", "pre", "blockquote", "h1", "h2", "h3", "h4", "div", "section", "br", "title"}
"""Elements that begin a paragraph."""
_LEFT_OUT = {"script", "style", "nav", "head", "footer"}
"""Elements whose text is not part of a page's content."""
_MAIN = {"main", "article"}
_HTML = {".html", ".htm", ".xhtml"}


class _Paragraphs(HTMLParser):
    """Collects the paragraphs of a page outside of navigation: `all`, and `main` from the main element on."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.main: list[str] = []
        self._hidden, self._in_main = 0, 0
        self._words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        main = tag in _MAIN or ("role", "main") in attrs
        if main or tag in _PARAGRAPHS or tag in _LEFT_OUT:
            self.end()
        self._hidden += tag in _LEFT_OUT
        self._in_main += main

    def handle_endtag(self, tag: str) -> None:
        if tag in _PARAGRAPHS or tag in _LEFT_OUT or tag in _MAIN:
            self.end()
        if tag in _LEFT_OUT:
            self._hidden = max(0, self._hidden - 1)

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)

    def end(self) -> None:
        """End the paragraph."""
        text = _SPACE.sub(" ", "".join(self._words)).strip()
        self._words = []
        if text:
            self.all.append(text)
            if self._in_main:
                self.main.append(text)


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a text or an HTML page, without navigation; the file may be compressed by gzip.

    Bytes that are not UTF-8 are replaced.

    Raises:
        DataError: the file cannot be read, is too large, or is not a text.
    """
    try:
        read = foreign.read_gzip if path.suffix == ".gz" else foreign.read_bytes
        raw = read(path, LARGEST)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"`{path.name}` cannot be read: {reason}") from error
    if b"\0" in raw:
        raise DataError(f"`{path.name}` is not a text: it has bytes of 0")
    text = raw.decode("utf-8-sig", errors="replace")
    if Path(path.name.removesuffix(".gz")).suffix.lower() not in _HTML:
        return [shown for part in text.split("\n\n") if (shown := _SPACE.sub(" ", part).strip())]
    parser = _Paragraphs()
    parser.feed(text)
    parser.close()
    parser.end()
    return parser.main or parser.all
