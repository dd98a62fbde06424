"""Chooses the number of tokens to draft from measured acceptance and cost; 0 where plain decoding is faster.

In a round that drafts γ tokens, a row gains 1 + Σ_k Π_{i ≤ k} a_i tokens on average, where a_i is the probability that
the i-th drafted token is accepted, given that all earlier ones were. The round takes the time of the drafter and of one
pass over γ + 1 tokens of each row. `DraftLength` chooses the γ that yields the most tokens per second. Because
verification is exact only if γ is chosen before anything is drafted, the choice depends only on earlier measurements
and on the grades of the drafts (see `Drafter.grades`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

FORGETTING = 0.98
"""Factor by which the counts of accepted and rejected tokens decay in each round, so that old rounds lose weight."""
HOPE, WEIGHT = 0.8, 4.0
"""Prior acceptance rate of a drafter, and the weight of this prior as a number of observed tokens. The prior is
optimistic, so that a new drafter is tried, and weak, so that a bad drafter is soon given up."""
FLAT = 0.02
"""Assumed cost of each further token in a pass, as a fraction of a pass over one token, until longer passes are
measured. The value is optimistic, so that longer passes are tried."""
GAIN = 1.02
"""Smallest expected speed-up for which tokens are drafted."""
PROBING = 0.01
"""Largest share of the time that is spent on trying drafts again while plain decoding is faster."""
KEPT = 9
"""Number of newest measurements of a cost that are stored; their median is the estimate of the cost."""
AGE, NEAR = 50, 1.5
"""While drafts speed up decoding by less than `NEAR`, a pass without drafts is measured again every `AGE` rounds."""


class Acceptance:
    """How often drafted tokens are accepted, by their position in the draft."""

    def __init__(self) -> None:
        self.stayed: list[float] = []
        self.tried: list[float] = []

    def learn(self, drafted: int, accepted: int) -> None:
        """Add the result of one round. Tokens up to and including the first rejected one count as tried; whether later
        tokens would have been accepted is not known."""
        while len(self.tried) < drafted:
            self.stayed.append(0.0)
            self.tried.append(0.0)
        for position in range(drafted):
            self.stayed[position] = self.stayed[position] * FORGETTING + (position < accepted)
            self.tried[position] = self.tried[position] * FORGETTING + (position <= accepted)

    def expected(self, longest: int) -> list[float]:
        """Expected number of tokens of a round, for each draft length from 0 to `longest`.

        The prior for the acceptance rate at a position is the estimate for the position before it.
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
    """Estimates the seconds of a pass over m tokens of each row, for every m, from measurements at some values of m."""

    def __init__(self) -> None:
        self.measured: dict[int, deque[float]] = {}
        self.seconds: dict[int, float] = {}
        """Seconds of a pass, by its number of tokens per row. The first measurement sets no entry, because it is often
        a cold start."""

    def learn(self, tokens: int, seconds: float) -> None:
        """Add the measured seconds of one pass over `tokens` tokens of each row."""
        newest = self.measured.setdefault(tokens, deque(maxlen=KEPT))
        newest.append(seconds)
        if len(newest) > 1:
            self.seconds[tokens] = min(newest) if len(newest) < 3 else median(newest)

    def table(self, longest: int) -> list[float]:
        """Seconds of passes over 1 to `longest` tokens of each row: measured, interpolated, or, beyond the longest
        measured pass, extrapolated optimistically.

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
                # A pass over two tokens costs about as much as the next longer pass that was measured, because products
                # with one row and with several rows run in different kernels.
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
    """Chooses draft lengths of at most `longest` tokens automatically; a `fixed` length other than 0 is always used
    instead."""

    longest: int
    fixed: int = 0
    acceptance: dict[int, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    """Acceptance by grade, which the drafter assigns to a draft in advance; a grade below 0 means that the drafter has
    no draft to offer."""
    costs: dict[int, PassCost] = field(default_factory=lambda: defaultdict(PassCost))
    """Cost of passes by the number of rows."""
    drafting: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    """Seconds of drafting one token, by the number of rows."""
    idle: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of decoding without drafts since the last draft, by the best grade among the rows."""
    price: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by which the newest round with drafts took longer than plain decoding of the same number of tokens, by
    the best grade among the rows."""
    age: int = 0
    """Number of rounds since the last pass without drafts."""

    def choose(self, grades: Sequence[int], longest: int) -> int:
        """Choose the draft length, at most `longest`, for the next pass over rows whose drafts have these grades.

        All rows get the same draft length, because rows are padded to the longest draft anyway.
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
        # Try a short draft now and then, because the text may have become easier; such trials take at most `PROBING` of
        # the time.
        return min(2, longest) if self.idle[max(grades)] * PROBING >= self.price[max(grades)] else 0

    def speeds(self, grades: Sequence[int], longest: int) -> list[float]:
        """Expected tokens a second for each draft length from 0 to `longest`."""
        rows = len(grades)
        table = self.costs[rows].table(longest + 1)
        seconds_a_token = median(self.drafting[rows]) if self.drafting[rows] else 0.0
        tokens = [0.0] * (longest + 1)
        for grade in grades:
            counts = self.acceptance[grade].expected(longest) if grade >= 0 else [1.0] * (longest + 1)
            tokens = [total + count for total, count in zip(tokens, counts, strict=True)]
        return [tokens[length] / (table[length] + seconds_a_token * length) for length in range(longest + 1)]

    def learn(
        self, grades: Sequence[int], drafted: Sequence[int], accepted: Sequence[int], drafting: float, reading: float
    ) -> None:
        """Update the estimates with the result of one round.

        Args:
            grades: grade of each row's draft.
            drafted: number of tokens drafted for each row.
            accepted: number of drafted tokens that were accepted in each row.
            drafting: time of the drafter in seconds.
            reading: time of the pass and of verification in seconds.
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
        if self.idle[best] == 0:  # otherwise, the drafter has also read the tokens that were decoded without drafts
            self.drafting[rows].append(drafting / longest)
        if 1 in cost.seconds:
            table = cost.table(longest + 1)
            self.price[best] = drafting + table[-1] - table[0] * (1 + sum(accepted) / rows)
        self.idle[best] = 0.0
        self.age += 1
