"""The schedule of prompts: which rows read how many tokens in the next pass, decided by a pure function, and the number
of tokens in a pass that keeps it short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SMALLEST = 16
"""Smallest limit on the tokens of a pass; fewer would not take less time, because a pass is bandwidth-bound then."""
TURNS = 3
"""Largest number of prompt passes in a row that read less than they could of the row that has been reading for
longest."""
LONG = 8
"""A prompt is long if it needs more passes than this; at most half of the slots read long prompts at the same time."""


class Unread(NamedTuple):
    """What is left to read of one row's prompt."""

    slot: int
    """Index of the row in the cache."""
    tokens: int
    """Number of tokens that the cache does not hold yet, at least 1."""
    alone: bool = False
    """Whether no other row may be read in the same pass."""


class PassPlan(NamedTuple):
    """A pass over prompts."""

    counts: dict[int, int]
    """Number of tokens that each slot reads."""
    skipped: int
    """Number of passes in a row, this one included, that have not read as much as they could of the oldest row."""


def plan_pass(unread: Sequence[Unread], budget: int, skipped: int) -> PassPlan:
    """Decide which rows are read in the next pass.

    A pass over neighbouring slots costs as much as the slots between the first and the last one, times the largest
    number of tokens of a row, because shorter rows are padded. This product is at most `budget`.

    The row with the fewest tokens left goes first, and takes neighbours along if that ends more prompts in this pass,
    or reads more tokens. After `TURNS` passes that have read less of the oldest row than they could, that row alone
    gets a pass. So each row ends after a bounded number of passes, whatever comes after it: the oldest of N tokens
    after at most (`TURNS` + 1) · ⌈N / `budget`⌉ passes.

    Args:
        unread: the rows with unread tokens, the oldest first.
        budget: largest number of tokens in the pass, padding included.
        skipped: `PassPlan.skipped` of the pass before.
    """
    counts = _counts(unread, budget, alone=skipped >= TURNS)
    whole = counts.get(unread[0].slot) == min(unread[0].tokens, budget)
    return PassPlan(counts, 0 if whole else skipped + 1)


def _counts(unread: Sequence[Unread], budget: int, *, alone: bool) -> dict[int, int]:
    """Number of tokens that each slot reads in the next pass.

    Args:
        alone: whether the oldest row is read alone.
    """
    first = unread[0] if alone else min(unread, key=lambda row: row.tokens)  # the oldest of equally short ones
    if alone or first.alone:
        return {first.slot: min(first.tokens, budget)}
    left = {row.slot: row.tokens for row in unread if not row.alone}
    below = [slot for slot in sorted(left) if slot < first.slot]
    above = [slot for slot in sorted(left) if slot > first.slot]
    best, low, high = {first.slot: min(first.tokens, budget)}, first.slot, first.slot
    while below or above:
        # The pass grows to the nearer of the two neighbours.
        if not above or (below and low - below[-1] <= above[0] - high):
            low = below.pop()
        else:
            high = above.pop(0)
        longest = budget // (high - low + 1)
        if longest == 0:
            break
        counts = {slot: min(tokens, longest) for slot, tokens in left.items() if low <= slot <= high}
        if _worth(counts, left) > _worth(best, left):
            best = counts
    return best


def _worth(counts: dict[int, int], left: dict[int, int]) -> tuple[int, int]:
    """Number of prompts that a pass ends, and number of tokens that it reads."""
    return sum(count == left[slot] for slot, count in counts.items()), sum(counts.values())


class TokenBudget:
    """The number of tokens in a prompt pass, adapted so that a pass takes at most `seconds`.

    The budget is `SMALLEST` times a power of two, and at most `largest`. It is halved after a pass that took too long,
    and doubled after one that took at most half of the time; after each halving, 8 times as many passes go by before
    the next doubling, because on a processor the time of a pass may jump where another kernel takes over.

    Args:
        largest: upper bound of the budget, in tokens.
        seconds: limit on the time of a pass; None always allows `largest` tokens.
    """

    def __init__(self, largest: int, seconds: float | None = None) -> None:
        self.largest, self.seconds = largest, seconds
        self.tokens = largest if seconds is None else min(SMALLEST, largest)
        self._pause, self._short = 1, 0

    def learn(self, tokens: int, seconds: float) -> None:
        """Adapt the budget to the time of a pass over so many tokens, padding included."""
        if self.seconds is None or 2 * tokens <= self.tokens:  # a small pass says little of a full one
            return
        if seconds > self.seconds:
            self._short = 0
            if self.tokens > SMALLEST:
                self.tokens, self._pause = max(SMALLEST, self.tokens // 2), min(8 * self._pause, 4096)
        elif 2 * seconds <= self.seconds:
            self._short += 1
            if self._short >= self._pause:
                self.tokens, self._short = min(2 * self.tokens, self.largest), 0
