"""Schedules the reading of prompts: a pure function decides which rows read how many tokens in the next pass, and a
token budget keeps each pass short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SMALLEST = 16
"""Smallest limit on the tokens of a pass; a pass of fewer tokens is bandwidth-bound and would not take less time."""
TURNS = 3
"""Largest number of consecutive prompt passes that read fewer tokens of the oldest row than the budget allows."""
LONG = 8
"""A prompt is long if it needs more passes than this; at most half of the slots read long prompts at the same time."""


class Unread(NamedTuple):
    """The unread part of one row's prompt."""

    slot: int
    """Index of the row in the cache."""
    tokens: int
    """Number of tokens that the cache does not hold yet, at least 1."""
    alone: bool = False
    """Whether no other row may be read in the same pass."""


class PassPlan(NamedTuple):
    """A planned pass over prompts."""

    counts: dict[int, int]
    """Number of tokens that each slot reads."""
    skipped: int
    """Number of consecutive passes, this one included, that read fewer tokens of the oldest row than they could."""


def plan_pass(unread: Sequence[Unread], budget: int, skipped: int) -> PassPlan:
    """Decide which rows are read in the next pass.

    A pass covers all slots from the first to the last one that it reads, and pads all rows to the longest. The cost of
    a pass is the number of these slots times the largest number of tokens of a row. This cost is at most `budget`.

    The row with the fewest unread tokens is read first. Neighbouring rows are read in the same pass if the pass then
    completes more prompts, or completes as many and reads more tokens. After `TURNS` passes that read fewer tokens of
    the oldest row than they could, a pass reads the oldest row alone. The number of passes until a prompt is read is
    therefore bounded, whatever requests arrive later: N tokens of the oldest row take at most
    (`TURNS` + 1) · ⌈N / `budget`⌉ passes.

    Args:
        unread: the rows with unread tokens, the oldest first.
        budget: largest number of tokens in the pass, padding included.
        skipped: `PassPlan.skipped` of the previous pass.
    """
    counts = _counts(unread, budget, alone=skipped >= TURNS)
    whole = counts.get(unread[0].slot) == min(unread[0].tokens, budget)
    return PassPlan(counts, 0 if whole else skipped + 1)


def _counts(unread: Sequence[Unread], budget: int, *, alone: bool) -> dict[int, int]:
    """Number of tokens that each slot reads in the next pass.

    Args:
        alone: whether the oldest row is read alone.
    """
    first = unread[0] if alone else min(unread, key=lambda row: row.tokens)  # among equally short rows, the oldest
    if alone or first.alone:
        return {first.slot: min(first.tokens, budget)}
    left = {row.slot: row.tokens for row in unread if not row.alone}
    below = [slot for slot in sorted(left) if slot < first.slot]
    above = [slot for slot in sorted(left) if slot > first.slot]
    best, low, high = {first.slot: min(first.tokens, budget)}, first.slot, first.slot
    while below or above:
        # The pass is extended to the nearer of the two neighbouring rows.
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
    """Number of prompts that a pass completes, and number of tokens that it reads."""
    return sum(count == left[slot] for slot, count in counts.items()), sum(counts.values())


class TokenBudget:
    """The number of tokens in a prompt pass, adapted so that a pass takes at most `seconds`.

    The budget is `SMALLEST` times a power of two, at most `largest`. The budget is halved after a pass that took too
    long, and doubled after passes that took at most half of `seconds`. Each halving multiplies the number of passes
    before the next doubling by 8, because the time of a pass on a CPU may jump at the size where another kernel is
    used.

    Args:
        largest: upper bound of the budget, in tokens.
        seconds: limit on the time of a pass; None always allows `largest` tokens.
    """

    def __init__(self, largest: int, seconds: float | None = None) -> None:
        self.largest, self.seconds = largest, seconds
        self.tokens = largest if seconds is None else min(SMALLEST, largest)
        self._pause, self._short = 1, 0

    def learn(self, tokens: int, seconds: float) -> None:
        """Adapt the budget to the time of a pass over `tokens` tokens, padding included."""
        if self.seconds is None or 2 * tokens <= self.tokens:  # a small pass says little about a full one
            return
        if seconds > self.seconds:
            self._short = 0
            if self.tokens > SMALLEST:
                self.tokens, self._pause = max(SMALLEST, self.tokens // 2), min(8 * self._pause, 4096)
        elif 2 * seconds <= self.seconds:
            self._short += 1
            if self._short >= self._pause:
                self.tokens, self._short = min(2 * self.tokens, self.largest), 0
