"""A page as one HTML file with style, script and data; its content security policy forbids loading anything else."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from shoestring.core.errors import ShoestringError
from shoestring.report.markup import Markup, embedded, join
from shoestring.storage.whole import write_atomic


@dataclass(frozen=True)
class PageFrame:
    """Style, script and footer that all pages of a kind share."""

    style: str
    script: str
    footer: str = ""
    """Sentences at the foot of every page, after the sentences that say how the page was made."""


def document(title: str, head: Markup, body: Markup, data: Any, frame: PageFrame) -> str:
    """Build the whole page; its policy allows the inline style and script by their hashes and embedded pictures,
    and forbids everything else."""
    sources = f"script-src {_hash(frame.script)}; style-src {_hash(frame.style)}"
    return Template(packaged("shoestring.report", "page.html")).substitute(
        title=join([title]),
        policy=f"default-src 'none'; {sources}; img-src data:; base-uri 'none'; form-action 'none'",
        style=frame.style,
        script=frame.script,
        footer=join([frame.footer]),
        head=head,
        body=body,
        data=embedded(data),
    )


def packaged(package: str, name: str) -> str:
    """The text of a file in the folder `web` of a package."""
    return files(package).joinpath("web", name).read_text("utf-8")


def save(path: Path, text: str) -> Path:
    """Write `text` to `path` atomically: readers never see half a page, and a full disk leaves the old page."""
    try:
        write_atomic(path, text.encode(errors="replace"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ShoestringError(
            f"cannot write {path}: {reason}", hint="free some space or make the folder writable"
        ) from error
    return path


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
