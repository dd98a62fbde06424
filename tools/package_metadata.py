"""What a package index shows of shoestring: the README and the project's URLs, put together when a package is built.

Links between files of the repository lead nowhere on an index. Where pyproject.toml says `repository` (in
[tool.hatch.metadata.hooks.custom]) they become absolute, and the URLs come from it; without it only their text stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


class PackageMetadata(MetadataHookInterface):
    """Fills in `readme` and `urls`, which pyproject.toml names as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = str(self.config.get("repository", "")).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, repository)}
        metadata["urls"] = urls(repository)


def for_index(text: str, repository: str) -> str:
    """The README with links that work away from the repository."""

    def replaced(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if repository:
            return f"{image}[{words}]({repository}/{'raw' if image else 'blob'}/main/{target})"
        return "" if image else words

    return _LINK.sub(replaced, text)


def urls(repository: str) -> dict[str, str]:
    """The links in the index's margin."""
    if not repository:
        return {}
    pages = {"Documentation": "blob/main/docs/concepts/index.md", "Changelog": "commits/main", "Issues": "issues"}
    return {"Repository": repository} | {name: f"{repository}/{page}" for name, page in pages.items()}
