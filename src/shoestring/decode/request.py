"""Requests for text, and the rows in which the engine generates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.decode.constraint import Constraint
from shoestring.decode.settings.generation import LogitChanges, Sampling
from shoestring.models.adapters_by_row import LoadedAdapter

Ending = Literal["stop", "length", "cancelled", "failed"]


class TokenLogprob(NamedTuple):
    """Log-probability of a token under the unmodified model, before penalties, temperature and filters."""

    token: int
    logprob: float
    """Natural logarithm of the probability."""
    top: list[tuple[int, float]]
    """The likeliest tokens at the same position with their log-probabilities, in descending order."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to continue a text.

    Raises:
        ConfigError: the prompt is empty, `max_new` is negative, or two settings exclude each other.
    """

    tokens: Sequence[int]
    """The prompt, at least one token."""
    max_new: int
    """Largest number of tokens to generate."""
    sampling: Sampling = field(default_factory=Sampling)
    changes: LogitChanges = field(default_factory=LogitChanges)
    constraint: Constraint | None = None
    """Constraint that the text follows; it belongs to this request alone."""
    stop: frozenset[int] = frozenset()
    """Tokens that end the text, and are not part of it."""
    rolling: bool = False
    """Whether the text continues when the context is full; otherwise it ends there. To continue, the oldest quarter of
    the context is dropped at once, because the rest has to be read again after every drop."""
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned at each position, besides the log-probability of
    the chosen token; None returns no log-probabilities."""
    prompt_logprobs: bool = False
    """Whether log-probabilities of the prompt are returned as well; no part of the prompt is then taken from the
    cache."""
    namespace: str = ""
    """Namespace of the text's cached keys and values; only texts of the same namespace and adapter may reuse them."""
    adapter: LoadedAdapter | None = None
    """Low-rank adapter that the text is generated with; None for the model alone."""
    client: str = ""
    """Client that sent the request; slots are shared fairly among clients."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt has no tokens", hint="begin with the tokenizer's end-of-text token")
        if self.max_new < 0:
            raise ConfigError(f"max_new is {self.max_new}", hint="give 0 or more")
        if self.rolling and self.prompt_logprobs:
            raise ConfigError(
                "a prompt that is cut to the context cannot return all its log-probabilities", hint="turn `rolling` off"
            )

    @property
    def cached_for(self) -> tuple[str, int | None]:
        """The namespace and the adapter; only texts for which both are equal may share cached keys and values."""
        return self.namespace, None if self.adapter is None else self.adapter.number

    @property
    def reads_only(self) -> bool:
        """Whether the prompt is only scored, so that no text is generated."""
        return self.max_new == 0 and self.prompt_logprobs and len(self.tokens) > 1


@dataclass(eq=False)
class Row:
    """A text that is being generated."""

    request: Request
    history: list[int]
    """The prompt and the tokens generated so far; all of them are final."""
    slot: int = -1
    """Index of the text's row in the cache; -1 while the text waits for a row."""
    turn: int = 0
    """Position of the row in the order in which rows were given slots."""
    begin: int = 0
    """Index of the first token of `history` that is still in the context."""
    begins: bool = True
    """Whether the next token is the first one after a prompt, or after the context was cut. Nothing is drafted for this
    position, so that the text does not depend on the passes in which the tokens before it are read."""
    fresh: list[int] = field(default_factory=list)
    """Tokens that the newest pass has added."""
    drafted: list[int] = field(default_factory=list)
    """Tokens that were drafted for the newest pass."""
    accepted: int = 0
    """Number of tokens in `drafted` that the model accepted."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of `fresh`, if requested; a stop token that ended the text adds one more entry."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt from its second token on, if requested."""
    ending: Ending | None = None
    """Why the text ended; None while it is generated."""
    error: Exception | None = None
    """Error that ended the text; None if the text has not failed. Any error but a `ShoestringError` was raised by a
    pass of the model."""
    reused: int = 0
    """Number of tokens of the prompt that were found in the cache."""

    @property
    def text(self) -> list[int]:
        """The tokens generated so far."""
        return self.history[len(self.request.tokens) :]

    def __len__(self) -> int:
        """Number of tokens generated so far."""
        return len(self.history) - len(self.request.tokens)


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` (T) under the logits (T, V), and of the `top` likeliest tokens at each position."""
    if not tokens:
        return []
    if max(tokens) >= logits.shape[-1]:  # on a GPU, an index out of range would end the process
        raise ConfigError(f"the model computes no logit for token {max(tokens)}, only for {logits.shape[-1]} tokens")
    precise = logits if logits.dtype == torch.float64 else logits.float()
    total = precise.logsumexp(-1, keepdim=True)
    chosen = precise.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]) - total
    best = precise.topk(min(top, precise.shape[-1]))
    likeliest = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, list(zip(*pair, strict=True)))
        for token, logprob, pair in zip(tokens, chosen.flatten().tolist(), likeliest, strict=True)
    ]
