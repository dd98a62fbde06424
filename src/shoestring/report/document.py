"""A page as one file: markup, style, script and data together, with a policy that lets nothing else load or run."""

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
    """What all pages of a kind share."""

    style: str
    script: str
    footer: str = ""
    """Sentences below every page, after those that say where it comes from."""


def document(title: str, head: Markup, body: Markup, data: Any, frame: PageFrame) -> str:
    """The whole page; its policy lets the two inline parts run, known by their hash, and nothing else load."""
    sources = f"script-src {_hash(frame.script)}; style-src {_hash(frame.style)}"
    return Template(packaged("shoestring.report", "page.html")).substitute(
        title=join([title]),
        policy=f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'",
        style=frame.style,
        script=frame.script,
        footer=join([frame.footer]),
        head=head,
        body=body,
        data=embedded(data),
    )


def packaged(package: str, name: str) -> str:
    """The text of a file for the browser that ships in the folder `web` of a package."""
    return files(package).joinpath("web", name).read_text("utf-8")


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


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
