"""How many tokens to draft, from measured acceptance and measured costs; none where plain decoding is faster.

A round that drafts γ tokens yields 1 + Σ_k Π_{i ≤ k} a_i tokens on average, a_i being the probability that the i-th
drafted token stays when those before it did, and costs one pass over γ + 1 tokens of each row and the drafter's time.
The length with the most tokens a second is taken. It is decided before anything is drafted, as exactness demands, and
is a function of what has been learnt: the same measurements give the same lengths.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

FORGETTING = 0.98
"""Share of the older evidence on acceptance that is left after each round."""
HOPE, WEIGHT = 0.8, 4.0
"""Acceptance of a drafter that was never tried, and how many tokens' evidence that counts for: it is tried soon, and
given up soon."""
FLAT = 0.02
"""Cost of one more token in a pass, as a fraction of a pass over one, where longer passes were not measured yet:
hopeful, so that they are tried, and then measured."""
GAIN = 1.02
"""Least expected speed-up for which anything is drafted."""
PROBING = 0.01
"""Largest share of the time that trying again costs, while plain decoding is faster."""
KEPT = 9
"""Measurements of the same cost that are kept; their median counts."""
AGE, NEAR = 50, 1.5
"""Rounds after which a pass without drafts is measured again, where it is slower by less than so much."""


class Acceptance:
    """How often drafted tokens stay, by their position in the draft."""

    def __init__(self) -> None:
        self.stayed: list[float] = []
        self.tried: list[float] = []

    def learn(self, drafted: int, accepted: int) -> None:
        """Add a round: its tokens up to the first that was rejected were tried; of those behind, nothing is known."""
        while len(self.tried) < drafted:
            self.stayed.append(0.0)
            self.tried.append(0.0)
        for position in range(drafted):
            self.stayed[position] = self.stayed[position] * FORGETTING + (position < accepted)
            self.tried[position] = self.tried[position] * FORGETTING + (position <= accepted)

    def expected(self, longest: int) -> list[float]:
        """The mean number of tokens of a round, for each draft length from 0 to `longest`.

        What little is known of a position is completed by the position before it.
        """
        tokens, together = [1.0], 1.0
        rate = (sum(self.stayed) + WEIGHT * HOPE) / (sum(self.tried) + WEIGHT)
        for position in range(longest):
            if position < len(self.tried):
                rate = (self.stayed[position] + WEIGHT * rate) / (self.tried[position] + WEIGHT)
            together *= rate
            tokens.append(tokens[-1] + together)
        return tokens


class PassCost:
    """Seconds of a pass over m tokens of each row, for every m, from measurements at some of them."""

    def __init__(self) -> None:
        self.measured: dict[int, deque[float]] = {}
        self.seconds: dict[int, float] = {}
        """By number of tokens, where there are two measurements or more: the first is often of a cold start."""

    def learn(self, tokens: int, seconds: float) -> None:
        """Add a measurement."""
        kept = self.measured.setdefault(tokens, deque(maxlen=KEPT))
        kept.append(seconds)
        if len(kept) > 1:
            self.seconds[tokens] = min(kept) if len(kept) < 3 else median(kept)

    def table(self, longest: int) -> list[float]:
        """The cost of 1 to `longest` tokens: as measured, in proportion between two that were, and hopeful beyond.

        A pass over 1 token must have been measured.
        """
        known = sorted(self.seconds)
        more = FLAT * self.seconds[1]
        table = [self.seconds[1]]
        for low, high in zip(known, [*known[1:], max(longest, known[-1]) + 1], strict=True):
            start = self.seconds[low]
            if high not in self.seconds:
                slope = more
            elif low == 1:
                # A pass over two tokens costs about as much as the next longer one that is known: products with one
                # row and with several take different ways.
                slope = more
                start = max(start, self.seconds[high] - more * (high - 1))
            else:
                slope = (self.seconds[high] - start) / (high - low)
            table += [start + slope * step for step in range(1, high - low)]
            if high in self.seconds:
                table.append(self.seconds[high])
        return table[:longest]


@dataclass
class DraftLength:
    """The automatic draft length. `longest` bounds it; `fixed`, if not 0, is always taken."""

    longest: int
    fixed: int = 0
    acceptance: dict[int, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    """By the grade that the drafter gives its own drafts beforehand; below 0 it has none to offer."""
    costs: dict[int, PassCost] = field(default_factory=lambda: defaultdict(PassCost))
    """By the number of rows."""
    drafting: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    """Seconds of drafting one token, by the number of rows."""
    idle: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of decoding without drafts since something was drafted, by the best grade among the rows."""
    price: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the newest round with drafts cost beyond passes without them for the same tokens, likewise."""
    age: int = 0
    """Rounds since a pass without drafts."""

    def choose(self, grades: Sequence[int], longest: int) -> int:
        """The length for a pass over rows whose drafts have these grades, at most `longest`.

        Rows of a pass are padded to the longest draft, so one length serves them all.
        """
        longest = min(longest, self.longest)
        if self.fixed or longest == 0 or max(grades) < 0:
            return min(self.fixed, longest)
        if 1 not in self.costs[len(grades)].seconds:
            return 0
        speeds = self.speeds(grades, longest)
        best = speeds.index(max(speeds))
        gain = speeds[best] / speeds[0]
        if gain >= GAIN:
            return 0 if gain < NEAR and self.age >= AGE else best
        # Trying again shows whether the text has become easier; what that costs is kept to a share of the time.
        return min(2, longest) if self.idle[max(grades)] * PROBING >= self.price[max(grades)] else 0

    def speeds(self, grades: Sequence[int], longest: int) -> list[float]:
        """Expected tokens a second for each draft length from 0 to `longest`."""
        rows = len(grades)
        table = self.costs[rows].table(longest + 1)
        each = median(self.drafting[rows]) if self.drafting[rows] else 0.0
        tokens = [0.0] * (longest + 1)
        for grade in grades:
            counts = self.acceptance[grade].expected(longest) if grade >= 0 else [1.0] * (longest + 1)
            tokens = [total + count for total, count in zip(tokens, counts, strict=True)]
        return [tokens[length] / (table[length] + each * length) for length in range(longest + 1)]

    def learn(
        self, grades: Sequence[int], drafted: Sequence[int], accepted: Sequence[int], drafting: float, reading: float
    ) -> None:
        """Add a round.

        Args:
            grades: of the drafts of each row.
            drafted: tokens drafted for each row.
            accepted: how many of them stayed.
            drafting: seconds that the drafter took.
            reading: seconds of the pass and of verification.
        """
        for grade, count, stayed in zip(grades, drafted, accepted, strict=True):
            if count:
                self.acceptance[grade].learn(count, stayed)
        rows, longest, best = len(grades), max(drafted), max(grades)
        cost = self.costs[rows]
        cost.learn(longest + 1, reading)
        if longest == 0:
            self.idle[best] += reading + drafting
            self.age = 0
            return
        if self.idle[best] == 0:  # otherwise the drafter has read what was decoded without it
            self.drafting[rows].append(drafting / longest)
        if 1 in cost.seconds:
            table = cost.table(longest + 1)
            self.price[best] = drafting + table[-1] - table[0] * (1 + sum(accepted) / rows)
        self.idle[best] = 0.0
        self.age += 1
