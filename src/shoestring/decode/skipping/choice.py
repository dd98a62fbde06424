"""Which sublayers to skip: the least change of the stream for the bytes that are to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from shoestring.core.errors import ConfigError
from shoestring.models.sublayers import KINDS, Kind

Ratios = Mapping[str, float]
"""r of each skipped sublayer: y = r · x."""

GRID = 20_000
"""Steps at most into which the bytes to save are divided, where the sublayers' bytes have no larger common divisor."""

SURE = 2.0
"""Standard errors by which a choice by measured losses has to be better than one by similarity."""

EXCHANGES, TRIED = 3, 8
"""Sublayers of a choice that are exchanged at most, and for each of them the exchanges whose loss is measured."""


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
    losses: Callable[[Ratios], Sequence[float]] | None = None
    """The mean loss of each of several sample texts with these sublayers skipped, for rules that measure it."""


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


def least_loss(statistics: Statistics, budget: float) -> Ratios:
    """Like `least_harm`, by losses on sample text where the statistics can measure them, else by similarity.

    The harm of a sublayer is the loss that skipping it alone adds, and then, once more, what it adds to or takes from
    the choice made so: sublayers that do each other's work are told apart. Both are noisy on little text and therefore
    averaged with what similarity suggests; and a choice made so is taken only where its loss is lower than that of the
    choice by similarity by more than SURE standard errors of the difference. Of each, the better of r = ‖y‖ / ‖x‖ and
    r = 1 is taken. In the end single sublayers are exchanged for others as long as that lowers the loss as surely: 2 to
    5 passes over the text for each sublayer, and a few.
    """
    losses, similar = statistics.losses, least_harm(statistics, budget)
    if losses is None or not similar:
        return similar
    ratios = {each.name: each.ratio for each in statistics.candidates}

    def loss(choice: Ratios) -> float:
        return fmean(losses(choice))

    def better(names: Ratios) -> Ratios:
        return min(({name: ratios[name] for name in names}, dict.fromkeys(names, 1.0)), key=loss)

    plain = replace(statistics, candidates=[replace(each, ratio=1.0) for each in statistics.candidates])
    base = loss({})
    alone = _measured(plain, {each.name: loss({each.name: 1.0}) - base for each in plain.candidates})
    first = least_harm(alone, budget)
    similar = min(better(similar), better(in_order_of_similarity(statistics, budget)), key=loss)
    second = least_harm(_measured(alone, _added(plain, first, loss)), budget)
    sure = [choice for choice in (better(first), better(second)) if _is_lower(losses(choice), losses(similar))]
    choice = min((similar, *sure), key=loss)
    for _ in range(EXCHANGES):
        exchanged = _exchanged(plain if set(choice.values()) == {1.0} else statistics, choice, budget, loss)
        if not exchanged or not _is_lower(losses(exchanged), losses(choice)):
            break
        choice = exchanged
    return choice


def in_order_of_similarity(statistics: Statistics, budget: float) -> Ratios:
    """The most similar sublayers, however many bytes each is, until the bytes are saved."""
    check_reachable(statistics, budget)
    ratios: dict[str, float] = {}
    for each in sorted(statistics.candidates, key=lambda each: -each.similarity):
        if saved_bytes(statistics, ratios) >= budget:
            break
        ratios[each.name] = each.ratio
    return ratios


def _added(statistics: Statistics, choice: Ratios, loss: Callable[[Ratios], float]) -> dict[str, float]:
    """What each sublayer adds to the loss of a choice that holds it, or would add to one that does not."""
    base = loss(choice)
    return {
        each.name: base - loss({name: ratio for name, ratio in choice.items() if name != each.name})
        if each.name in choice
        else loss({**choice, each.name: each.ratio}) - base
        for each in statistics.candidates
    }


def _exchanged(statistics: Statistics, choice: Ratios, budget: float, loss: Callable[[Ratios], float]) -> Ratios | None:
    """The choice with one sublayer exchanged for another, or left out where the bytes allow it, of the lowest loss."""
    added, saved = _added(statistics, choice, loss), saved_bytes(statistics, choice)
    skipped = [each for each in statistics.candidates if each.name in choice]
    others = [each for each in statistics.candidates if each.name not in choice]
    gains = {
        (out.name, into): added[out.name] - (added[into.name] if into else 0.0)
        for out in skipped
        for into in (None, *others)
        if saved - out.bytes + (into.bytes if into else 0) >= budget
    }
    found = []
    for out, into in sorted(gains, key=lambda pair: -gains[pair])[:TRIED]:
        kept = {name: ratio for name, ratio in choice.items() if name != out}
        found.append(kept | ({into.name: into.ratio} if into else {}))
    return min(found, key=loss, default=None)


def _is_lower(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the mean of paired losses is lower beyond doubt."""
    differences = [other - loss for loss, other in zip(losses, others, strict=True)]
    if len(differences) < 2:
        return differences[0] > 0
    return fmean(differences) > SURE * stdev(differences) / len(differences) ** 0.5


def _measured(statistics: Statistics, losses: Mapping[str, float]) -> Statistics:
    """The harm of each sublayer averaged with a loss of its own; harm is scaled so that both are equal in all."""
    candidates = []
    for kind in KINDS:
        own = [each for each in statistics.candidates if each.kind == kind]
        # The median is not moved by the few sublayers without which nothing works.
        scale = [max(losses[each.name], 0.0) / each.harm for each in own if each.harm > 0]
        slope = median(scale) if scale else 1.0
        candidates += [replace(each, harm=(slope * each.harm + max(losses[each.name], 0.0)) / 2) for each in own]
    order = {each.name: index for index, each in enumerate(statistics.candidates)}
    return replace(statistics, candidates=sorted(candidates, key=lambda each: order[each.name]))


def price(statistics: Statistics, ratios: Ratios) -> float:
    """The most harm for a byte saved among sublayers that are skipped; 0 where none is."""
    skipped = (each for each in statistics.candidates if each.name in ratios)
    return max((each.harm / each.bytes for each in skipped), default=0.0)


def within_price(statistics: Statistics, most: float, kind: Kind = "feed-forward") -> Ratios:
    """The sublayers of a kind whose harm for a byte is at most so much."""
    candidates = (each for each in statistics.candidates if each.kind == kind)
    return {each.name: each.ratio for each in candidates if each.harm / each.bytes <= most}
