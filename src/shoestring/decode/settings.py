"""The settings of generation: how tokens are sampled and drafted ahead; free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from shoestring.core.errors import ConfigError

Verification = Literal["token", "block", "invariant"]
Passes = Literal["auto", "plain", "graphs", "compiled"]

LOOKUP, SKIP = "lookup", "skip"
"""Drafters that are no model's name: prompt lookup, and the model itself without some of its sublayers."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled from the model's logits.

    The order is: repetition penalty, temperature, top-k, top-p, min-p; each sees what the ones before it left.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    """Sampling temperature, which divides the logits: lower is more predictable, 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 samples from all."""
    top_p: float = 1.0
    """Total probability of the likeliest tokens to sample from (nucleus sampling); 1 samples from all."""
    min_p: float = 0.0
    """Least probability of a token that may be sampled, as a fraction of the likeliest token's; 0 samples from all."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the text already holds: their logits are divided by it where positive and
    multiplied by it where negative; 1 is no penalty, larger values repeat less."""
    seed: int = 0
    """Seed of the sampling; the same seed gives the same text."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            _refuse("temperature", self.temperature, "give 0 for the likeliest token, or a positive number")
        if self.top_k < 0:
            _refuse("top_k", self.top_k, "give 0 for all tokens, or a positive number")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "give a number above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "give a number from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            _refuse("repetition_penalty", self.repetition_penalty, "give a positive number; 1 is no penalty")
        if not 0 <= self.seed < 2**63:
            _refuse("seed", self.seed, "give an integer from 0, below 2**63")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: a cheap drafter proposes tokens, and the model verifies several of them in one pass.

    Whatever the drafter proposes, the text follows the model's own distribution.

    Raises:
        ConfigError: a value out of range.
    """

    drafter: str = ""
    """Proposes the tokens: the name or folder of a smaller model with the same vocabulary, `lookup` (continuations of
    repeated passages of the prompt and the text) or `skip` (the model itself without some sublayers); by default
    nothing is drafted."""
    drafter_dtype: Literal["own", "model"] = "own"
    """Data type of the weights of a smaller model that drafts: that of its files (`own`), or that of the model that
    verifies (`model`); the narrower one is read faster."""
    draft_length: int = 0
    """Number of tokens to draft before each pass of the model; 0 chooses it from measured acceptance and cost, and
    drafts nothing where that is faster."""
    max_draft_length: int = 16
    """Largest number of tokens to draft before one pass; bounds the automatic choice and the memory of a pass."""
    verification: Verification = "invariant"
    """Rule that decides which drafted tokens stay. Each keeps the model's distribution: `invariant` also gives, at the
    same seed, the text that the model gives without drafts; `token` and `block` may give another text of the same
    distribution and accept somewhat more tokens of a drafter that samples, `block` the most."""

    def __post_init__(self) -> None:
        if self.max_draft_length < 1:
            _refuse("max_draft_length", self.max_draft_length, "give a positive number")
        if not 0 <= self.draft_length <= self.max_draft_length:
            _refuse("draft_length", self.draft_length, f"give 0 to choose it, or up to {self.max_draft_length}")
        if self.verification not in get_args(Verification):
            _refuse("verification", self.verification, "give `token`, `block` or `invariant`")
        if self.drafter_dtype not in ("own", "model"):
            _refuse("drafter_dtype", self.drafter_dtype, "give `own` or `model`")


def _refuse(name: str, value: object, hint: str) -> None:
    raise ConfigError(f"{name} is {value}", hint=hint)
