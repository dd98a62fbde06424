"""Describes the served model for the parsing of requests: its name, tokenizer, chat template and limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shoestring.data.chat_template import ChatTemplate, chat_template, template_source
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.settings.generation import SamplingDefaults, SamplingRule


@dataclass(frozen=True, kw_only=True)
class Served:
    """The served model: its name, tokenizer, chat template and limits."""

    name: str
    """Name that clients send in the field `model`."""
    tokenizer: Tokenizer
    context: int
    """Largest number of tokens of a prompt and its text together."""
    max_tokens: int
    """Largest number of tokens of a text."""
    vocabulary: int
    """Number of token ids that are valid for both the tokenizer and the model."""
    stop: frozenset[int] = frozenset()
    """Tokens that end a text."""
    chat: bool = False
    """Whether the model has a chat template."""
    defaults: SamplingDefaults = field(default_factory=lambda: SamplingDefaults(SamplingRule(), {}))
    """Sampling settings for requests that set none."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time at which the model was loaded, in seconds since 1970."""

    @property
    def characters(self) -> int:
        """Upper bound on the number of characters of a prompt that fits into the context."""
        return self.context * self.tokenizer.longest

    @cached_property
    def template_source(self) -> str:
        """The source of the chat template; empty if there is none."""
        return template_source(self.tokenizer) or ""

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The compiled chat template. Read this only in a process that can be killed, because compiling a template may
        take forever.

        Raises:
            DataError: the template is not valid.
        """
        return chat_template(self.tokenizer)


def describe(
    name: str,
    tokenizer: Tokenizer,
    context: int,
    ends: Sequence[int] = (),
    max_tokens: int = 0,
    vocabulary: int | None = None,
    defaults: SamplingDefaults | None = None,
) -> Served:
    """Describe a model for the parsing of requests.

    Args:
        context: largest number of tokens of a prompt and its text together.
        ends: tokens that end a text, in addition to the tokenizer's end-of-text tokens.
        max_tokens: largest number of tokens of a text; 0 allows as many as the context has room for.
        vocabulary: number of token ids that the model has embeddings for; None if it is not known.
        defaults: sampling settings for requests that set none; None samples from the unmodified distribution.

    Raises:
        DataError: the chat template is not valid.
    """
    return Served(
        name=name,
        tokenizer=tokenizer,
        context=context,
        max_tokens=min(max_tokens or context, context),
        vocabulary=min(tokenizer.vocab_size, vocabulary or tokenizer.vocab_size),
        stop=frozenset({*tokenizer.ends, *ends}),
        chat=template_source(tokenizer) is not None,
        defaults=defaults or SamplingDefaults(SamplingRule(), {}),
    )
