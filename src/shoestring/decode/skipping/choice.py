"""Which sublayers to skip: the least change of the stream for the bytes that are to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoestring.core.errors import ConfigError
from shoestring.models.sublayers import Kind

Ratios = Mapping[str, float]
"""r of each skipped sublayer: y = r · x."""

GRID = 20_000
"""Steps at most into which the bytes to save are divided, where the sublayers' bytes have no larger common divisor."""


@dataclass(frozen=True)
class SkipCandidate:
    """A sublayer that might be skipped."""

    name: str
    kind: Kind
    layer: int
    bytes: int
    """What it moves for one token at the length of context in question."""
    similarity: float
    ratio: float
    harm: float
    """What skipping it is expected to cost; adds up over the sublayers that are skipped together."""


@dataclass(frozen=True)
class Statistics:
    """What a rule chooses by."""

    candidates: Sequence[SkipCandidate]
    """In the order in which they run."""
    blocks: Sequence[float]
    """cos(x, y) of whole blocks."""
    total: int
    """Bytes that the whole model moves for one token."""
    loss: Callable[[Ratios], float] | None = None
    """The loss on sample text with these sublayers skipped, for rules that measure it."""


Rule = Callable[[Statistics, float], Ratios]
"""From statistics and the bytes to save at least, to the sublayers to skip."""


def saved_bytes(statistics: Statistics, ratios: Ratios) -> int:
    """Bytes a token that skipping saves."""
    return sum(candidate.bytes for candidate in statistics.candidates if candidate.name in ratios)


def least_harm(statistics: Statistics, budget: float) -> Ratios:
    """The sublayers that save the bytes at the least harm in all: a knapsack, solved exactly by dynamic programming.

    Raises:
        ConfigError: all sublayers together do not save as much.
    """
    candidates = statistics.candidates
    check_reachable(statistics, budget)
    if budget <= 0:
        return {}
    unit = max(math.gcd(*(candidate.bytes for candidate in candidates)), int(budget) // GRID, 1)
    need = math.ceil(budget / unit)
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # by the units saved: the least harm, and which as bits
    for index, candidate in enumerate(candidates):
        for saved, (harm, chosen) in list(best.items()):
            reached = min(need, saved + candidate.bytes // unit)  # rounded down, so that the budget is met
            found = (harm + candidate.harm, chosen | 1 << index)
            if reached > saved and (reached not in best or found[0] < best[reached][0]):
                best[reached] = found
    if need not in best:  # the rounding of bytes alone
        return {candidate.name: candidate.ratio for candidate in candidates}
    chosen = best[need][1]
    return {candidate.name: candidate.ratio for index, candidate in enumerate(candidates) if chosen >> index & 1}


def check_reachable(statistics: Statistics, budget: float) -> None:
    """Raises: ConfigError, all sublayers together do not save as many bytes."""
    most = sum(candidate.bytes for candidate in statistics.candidates)
    if budget > most:
        raise ConfigError(
            f"skipping cannot save {budget / statistics.total:.0%} of the bytes: all sublayers together are "
            f"{most / statistics.total:.0%}",
            hint="give a smaller share",
        )


def price(statistics: Statistics, ratios: Ratios) -> float:
    """The most harm for a byte saved among sublayers that are skipped; 0 where none is."""
    skipped = (each for each in statistics.candidates if each.name in ratios)
    return max((each.harm / each.bytes for each in skipped), default=0.0)


def within_price(statistics: Statistics, most: float, kind: Kind = "feed-forward") -> Ratios:
    """The sublayers of a kind whose harm for a byte is at most so much."""
    candidates = (each for each in statistics.candidates if each.kind == kind)
    return {each.name: each.ratio for each in candidates if each.harm / each.bytes <= most}
