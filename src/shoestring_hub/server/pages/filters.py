"""Filters for the templates."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from django import template
from django.utils.safestring import SafeString, mark_safe

from shoestring import figures
from shoestring_hub.server.markdown import render_markdown

register = template.Library()


@register.filter
def markdown(text: str, people: Container[str] = ()) -> SafeString:
    """Render notes and comments from Markdown to sanitized HTML; mentions of `people` become links."""
    return mark_safe(render_markdown(text, people))


@register.filter
def size(nbytes: float) -> str:
    """Format a number of bytes with its unit."""
    return figures.size(nbytes)


@register.filter
def runtime(seconds: float) -> str:
    """Format the length of a clip, such as `1:05`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


@register.filter
def clip_state(state: str) -> str:
    """What the state of a clip's conversion means."""
    return {"waiting": "waiting to be converted", "held": "being converted", "failed": "failed"}.get(state, "ready")


@register.filter
def item(table: dict[Any, Any], key: Any) -> Any:
    """Look up a key in a table; returns an empty string if the key is missing."""
    return table.get(key, "")
