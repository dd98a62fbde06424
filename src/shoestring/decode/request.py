"""A text to continue, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.decode.settings import Sampling

Ending = Literal["stop", "length", "cancelled", "failed"]


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability by the model alone: before penalties, temperature and filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens of the position with theirs, likeliest first; as many as the request wants."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text to continue.

    Raises:
        ConfigError: no prompt, a negative number of tokens, or values that exclude each other.
    """

    tokens: Sequence[int]
    """The prompt, at least one token."""
    max_new: int
    """The most tokens to generate."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    """The text ends at one of these tokens, which is not part of it."""
    rolling: bool = False
    """Text goes on when the context is full: the oldest quarter of what is seen is then dropped at once, so that the
    rest is read again only rarely. Otherwise it ends there."""
    logprobs: int | None = None
    """Also wanted: log-probabilities of the tokens, and of so many of the likeliest at each position."""
    prompt_logprobs: bool = False
    """They are wanted of the prompt, too, which is then read whole."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt has no tokens", hint="begin with the tokenizer's end-of-text token")
        if self.max_new < 0:
            raise ConfigError(f"max_new is {self.max_new}", hint="give 0 or more")
        if self.rolling and self.prompt_logprobs:
            raise ConfigError("log-probabilities of a prompt that is cut to the context", hint="turn `rolling` off")

    @property
    def reads_only(self) -> bool:
        """Whether nothing is generated: the prompt's log-probabilities are all that is wanted."""
        return self.max_new == 0 and self.prompt_logprobs and len(self.tokens) > 1


@dataclass(eq=False)
class Row:
    """A text that is being generated."""

    request: Request
    history: list[int]
    """The prompt and what follows it so far; all of it is final."""
    slot: int = -1
    """Its row of the cache; -1 while it waits for one."""
    begin: int = 0
    """The first token of `history` that is still seen."""
    fresh: list[int] = field(default_factory=list)
    """The tokens that the newest pass has added."""
    drafted: list[int] = field(default_factory=list)
    """The tokens that were drafted for the newest pass."""
    accepted: int = 0
    """How many of them, from the first on, the model accepted."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of `fresh`, where they are wanted; one more where a stop token was next."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt from its second token on, where they are wanted."""
    ending: Ending | None = None
    error: ShoestringError | None = None
    """Why it failed."""
    reused: int = 0
    """Tokens of the prompt that did not have to be read, for they were in the cache."""

    @property
    def text(self) -> list[int]:
        """The tokens generated so far."""
        return self.history[len(self.request.tokens) :]

    def __len__(self) -> int:
        """How many those are."""
        return len(self.history) - len(self.request.tokens)


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` (T), each by its logits (T, V), and of the `top` likeliest at each position."""
    if not tokens:
        return []
    precise = logits if logits.dtype == torch.float64 else logits.float()
    total = precise.logsumexp(-1, keepdim=True)
    chosen = precise.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]) - total
    best = precise.topk(min(top, precise.shape[-1]))
    likeliest = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, list(zip(*pair, strict=True)))
        for token, logprob, pair in zip(tokens, chosen.flatten().tolist(), likeliest, strict=True)
    ]
