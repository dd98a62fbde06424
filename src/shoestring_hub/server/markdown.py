"""Renders what people write from Markdown to HTML, and finds the people whom they mention."""

from __future__ import annotations

import re
from collections.abc import Container
from functools import lru_cache
from typing import Any

import nh3
from django.urls import reverse
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

from shoestring_hub.server.models import COMMENT

_MENTION = re.compile(r"(?<![\w@.+/-])@([\w.@+-]{1,150})")
_TRAILING = ".@+-"
"""Characters that a name may contain, but that usually belong to the sentence if the name ends with them."""


def _link_mentions(state: StateCore) -> None:
    """Turn names after an @ into links, outside of code and links; only names in `state.env["people"]`."""
    people: Container[str] = state.env.get("people", ())
    for block in state.tokens:
        tokens, depth = [], 0
        for token in block.children or ():
            depth += token.nesting if token.type in ("link_open", "link_close") else 0
            linked = token.type == "text" and not depth and "@" in token.content
            tokens += _with_mentions(token.content, people, state.env) if linked else [token]
        block.children = tokens if block.children is not None else None


def _with_mentions(text: str, people: Container[str], env: Any) -> list[Token]:
    tokens, end = [], 0
    for match in _MENTION.finditer(text):
        name = match[1] if match[1] in people else match[1].rstrip(_TRAILING)
        if name not in people:
            continue
        env.setdefault("mentioned", set()).add(name)
        link = Token("link_open", "a", 1, attrs={"href": reverse("person", kwargs={"name": name})})
        tokens += [_text(text[end : match.start()]), link, _text(f"@{name}"), Token("link_close", "a", -1)]
        end = match.start() + 1 + len(name)
    return [*tokens, _text(text[end:])]


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_MARKDOWN.core.ruler.push("mentions", _link_mentions)


def render_markdown(text: str, people: Container[str] = ()) -> str:
    """Render Markdown to HTML; HTML in the text is shown as text, and the result is sanitized as well.

    Args:
        people: names that become links to the person's page where they follow an @.
    """
    if len(text) <= COMMENT and isinstance(people, frozenset):
        return _render_once(text, people)
    return _render(text, people)


def _render(text: str, people: Container[str]) -> str:
    return nh3.clean(_MARKDOWN.render(text, {"people": people}), link_rel="noopener noreferrer nofollow")


# Some texts of 5,000 characters take 0.2 s to render, and a page can have many of them.
_render_once = lru_cache(maxsize=500)(_render)


def mentioned(text: str, people: Container[str]) -> set[str]:
    """Names in `people` that a text mentions."""
    env: dict[str, Any] = {"people": people}
    _MARKDOWN.parse(text, env)
    return env.get("mentioned", set())
