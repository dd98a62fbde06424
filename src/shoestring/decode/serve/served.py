"""The model that a server serves, as far as requests need to know it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.errors import DataError
from shoestring.data.chat_template import ChatTemplate, chat_template
from shoestring.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model's name, its text and its limits."""

    name: str
    """By which clients ask for it."""
    tokenizer: Tokenizer
    context: int
    """Tokens of a prompt and its text together."""
    max_tokens: int
    """The most tokens that one text may have."""
    stop: frozenset[int]
    """Tokens at which a text ends."""
    template: ChatTemplate | None = None
    """None where the model was not made for chat."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When it was loaded, in seconds since 1970."""


def describe(name: str, tokenizer: Tokenizer, context: int, folder: Path | None = None, max_tokens: int = 0) -> Served:
    """What requests need to know of a model.

    Args:
        context: tokens that the engine keeps of each text.
        folder: of the model, whose generation_config.json may name more tokens that end a text.
        max_tokens: of one text; 0 is what the context has room for.

    Raises:
        DataError: the chat template, or generation_config.json, is not valid.
    """
    ends = {tokenizer.end_of_text, *_named_ends(folder)}
    return Served(
        name=name,
        tokenizer=tokenizer,
        context=context,
        max_tokens=min(max_tokens or context, context),
        stop=frozenset(ends),
        template=chat_template(tokenizer),
    )


def _named_ends(folder: Path | None) -> list[int]:
    """The ends of text that generation_config.json names."""
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return []
    try:
        named: Any = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"`{path}` is not a JSON object: {error}") from error
    named = named if isinstance(named, list) else [named]
    return [token for token in named if isinstance(token, int)]
