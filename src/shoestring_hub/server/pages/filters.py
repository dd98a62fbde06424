"""Filters of the templates."""

from __future__ import annotations

from typing import Any

import nh3
from django import template
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt

from shoestring import figures

register = template.Library()
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


@register.filter
def markdown(text: str) -> SafeString:
    """Notes as HTML: HTML in the text is shown as text, and what the renderer wrote is cleaned once more."""
    return mark_safe(nh3.clean(_MARKDOWN.render(text), link_rel="noopener noreferrer nofollow"))


@register.filter
def size(nbytes: float) -> str:
    """A number of bytes with its unit."""
    return figures.size(nbytes)


@register.filter
def item(table: dict[Any, Any], key: Any) -> Any:
    """The entry of a table; empty if there is none."""
    return table.get(key, "")
