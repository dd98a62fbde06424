"""The site's pages that lie outside of docs/, its API reference and its navigation; a hook of MkDocs (mkdocs.yml).

Pages keep the links that they have in the repository. Here a link to another page is made one to its place on the site;
one to a file that the site does not have leads to the repository, where pyproject.toml names it, and else becomes text.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import shoestring
from shoestring.areas import AREAS

ROOT = Path(__file__).parents[1]
CARDS = sorted((ROOT / "src" / "shoestring").glob("*/README.md"))
METHODS = {path.relative_to(ROOT).as_posix(): f"methods/{path.parent.name}.md" for path in CARDS}
MOVED = {"README.md": "index.md", "DESIGN.md": "design.md", "CONTRIBUTING.md": "contributing.md", **METHODS}
"""Maps a file of the repository outside of docs/ to its place on the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: every page has a place in it."""
    guides = sorted(path.name for path in (ROOT / "docs" / "guides").glob("*.md"))
    coming = [f"guides/{name}" for name in guides if name.startswith("from-")]
    config.nav = [
        {"Home": "index.md"},
        {"Coming from": coming},
        {"Guides": [f"guides/{name}" for name in guides if not name.startswith("from-")]},
        {"Methods": list(METHODS.values())},
        {"Reference": ["reference/run-file.md", "reference/platforms.md", *api_pages()]},
        {"Evidence": ["comparisons.md", "evidence.md", "case-studies.md", "log.md"]},
        {"Project": ["concepts/index.md", "design.md", "concepts/security.md", "contributing.md"]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/ and the API reference."""
    for source, place in MOVED.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    for place, text in api_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    place = page.file.src_uri
    source = next((source for source, moved in MOVED.items() if moved == place), f"docs/{place}")

    def replaced(match: re.Match[str]) -> str:
        image, words, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        uri = MOVED.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(uri):
            return f"{image}[{words}]({posixpath.relpath(uri, posixpath.dirname(place) or '.')}{anchor or ''})"
        if not (ROOT / path).exists():
            return match.group()  # MkDocs reports it
        return f"[{words}]({REPOSITORY}/blob/main/{path})" if REPOSITORY else words

    return _LINK.sub(replaced, markdown)


def api_pages() -> dict[str, str]:
    """One page for each module with public names: where it lies on the site, and what MkDocs makes the page of."""
    pages = {"api/shoestring.md": _api_page("shoestring", [name for name in shoestring.__all__ if name not in AREAS])}
    for module in (*sorted({*AREAS, "data", "report", "tune"}), "testing"):
        name = f"shoestring.{module}"
        pages[f"api/{name}.md"] = _api_page(name, importlib.import_module(name).__all__)
    return pages


def _api_page(module: str, names: list[str]) -> str:
    """A heading, the module's docstring, and a directive for each public name at the place where it is defined."""
    imported = importlib.import_module(module)
    parts = [f"# {module}", (imported.__doc__ or "").strip().partition("\n\n")[0]]
    for name in sorted(names, key=str.lower):
        value = getattr(imported, name)
        home = getattr(value, "__module__", "")
        directive = f"{home}.{value.__qualname__}" if home and hasattr(value, "__qualname__") else f"{module}.{name}"
        parts.append(f"::: {directive}")
    return "\n\n".join(parts) + "\n"


def _repository() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return str(project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]).rstrip("/")


REPOSITORY = _repository()
