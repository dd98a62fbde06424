"""Filters for the templates."""

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
    """Render notes from Markdown to HTML; HTML in the notes is shown as text, and the result is sanitized as well."""
    return mark_safe(nh3.clean(_MARKDOWN.render(text), link_rel="noopener noreferrer nofollow"))


@register.filter
def size(nbytes: float) -> str:
    """Format a number of bytes with its unit."""
    return figures.size(nbytes)


@register.filter
def item(table: dict[Any, Any], key: Any) -> Any:
    """Look up a key in a table; returns an empty string if the key is missing."""
    return table.get(key, "")
