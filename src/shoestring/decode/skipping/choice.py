"""Chooses the sublayers to skip: the least harmful sublayers that save the requested bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.models.sublayers import KINDS, Kind

Ratios = Mapping[str, float]
"""Maps the name of each skipped sublayer to the factor r of its replacement, y = r · x."""

GRID = 20_000
"""Resolution of the knapsack: the bytes to save are divided into at most this many units."""

SURE = 2.0
"""Number of standard errors by which a choice must lower the measured loss to replace an earlier choice."""

EXCHANGES, TRIED = 3, 8
"""Largest number of exchanges in a search, and number of candidates for each exchange whose loss is measured."""


@dataclass(frozen=True)
class SkipCandidate:
    """A sublayer that might be skipped."""

    name: str
    kind: Kind
    layer: int
    bytes: int
    """Bytes that the sublayer moves for one token at the assumed context length."""
    similarity: float
    """Mean of cos(x, y), where x and y are the residual stream before and after the sublayer."""
    ratio: float
    """Norm of the residual stream after the sublayer divided by the norm before it, ‖y‖ / ‖x‖."""
    harm: float
    """Expected cost in quality of skipping the sublayer; the costs of several skipped sublayers add up."""


@dataclass(frozen=True)
class Statistics:
    """Measurements of a model's sublayers, from which a rule chooses what to skip."""

    candidates: Sequence[SkipCandidate]
    """The sublayers, in the order in which they run."""
    blocks: Sequence[float]
    """Mean of cos(x, y) of each block, where x and y are the residual stream before and after the block."""
    total: int
    """Bytes that the whole model moves for one token."""
    losses: Callable[[Ratios], Sequence[float]] | None = None
    """Measures the mean loss of each sample text with some sublayers skipped; None if losses are not measured."""


Rule = Callable[[Statistics, float], Ratios]
"""Chooses the sublayers to skip from statistics and the least number of bytes to save."""


def saved_bytes(statistics: Statistics, ratios: Ratios) -> int:
    """Number of bytes per token that need not be moved if these sublayers are skipped."""
    return sum(candidate.bytes for candidate in statistics.candidates if candidate.name in ratios)


def least_harm(statistics: Statistics, budget: float) -> Ratios:
    """Choose the sublayers that save `budget` bytes per token at the least total harm: a knapsack problem, solved by
    dynamic programming.

    Raises:
        ConfigError: skipping all sublayers would save fewer bytes than the budget.
    """
    candidates = statistics.candidates
    check_reachable(statistics, budget)
    if budget <= 0:
        return {}
    unit = max(math.gcd(*(candidate.bytes for candidate in candidates)), int(budget) // GRID, 1)
    need = math.ceil(budget / unit)
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # units saved: least harm, and bits of the chosen sublayers
    for index, candidate in enumerate(candidates):
        for saved, (harm, chosen) in list(best.items()):
            reached = min(need, saved + candidate.bytes // unit)  # rounded down, so that the choice meets the budget
            state = (harm + candidate.harm, chosen | 1 << index)
            if reached > saved and (reached not in best or state[0] < best[reached][0]):
                best[reached] = state
    if need not in best:  # rounding leaves the sum of all sublayers below the budget
        return {candidate.name: candidate.ratio for candidate in candidates}
    chosen = best[need][1]
    return {candidate.name: candidate.ratio for index, candidate in enumerate(candidates) if chosen >> index & 1}


def check_reachable(statistics: Statistics, budget: float) -> None:
    """Raise ConfigError if skipping all sublayers would save fewer bytes than the budget."""
    most = sum(candidate.bytes for candidate in statistics.candidates)
    if budget > most:
        raise ConfigError(
            f"skipping cannot save {figures.percent(budget / statistics.total)} of the bytes moved per token: all "
            f"sublayers together move {figures.percent(most / statistics.total)}",
            hint="give a smaller share",
        )


def least_loss(statistics: Statistics, budget: float) -> Ratios:
    """Choose sublayers like `least_harm`, but by losses measured on sample text if the statistics can measure them.

    In the first choice, the harm of a sublayer is the loss that skipping only this sublayer adds. Because some
    sublayers can stand in for each other, a second choice uses the change of the loss when the sublayer is added to the
    first choice or removed from it. Losses measured on little text are noisy, so both choices average these losses with
    the harm that similarity suggests. A choice by losses replaces the choice by similarity only if its loss is lower by
    more than SURE standard errors of the difference. Each choice uses r = ‖y‖ / ‖x‖ or r = 1, whichever gives the lower
    loss. Finally, single sublayers are exchanged for others as long as an exchange lowers the loss by more than the
    same margin. The whole search takes 2 to 5 passes over the text for each sublayer, and a few more.
    """
    losses, similar = statistics.losses, least_harm(statistics, budget)
    if losses is None or not similar:
        return similar
    ratios = {candidate.name: candidate.ratio for candidate in statistics.candidates}

    def loss(choice: Ratios) -> float:
        return fmean(losses(choice))

    def better(names: Ratios) -> Ratios:
        return min(({name: ratios[name] for name in names}, dict.fromkeys(names, 1.0)), key=loss)

    plain = replace(statistics, candidates=[replace(candidate, ratio=1.0) for candidate in statistics.candidates])
    base = loss({})
    alone = _measured(plain, {candidate.name: loss({candidate.name: 1.0}) - base for candidate in plain.candidates})
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
    """Skip sublayers in descending order of similarity, regardless of their bytes, until the budget is met."""
    check_reachable(statistics, budget)
    ratios: dict[str, float] = {}
    for candidate in sorted(statistics.candidates, key=lambda candidate: -candidate.similarity):
        if saved_bytes(statistics, ratios) >= budget:
            break
        ratios[candidate.name] = candidate.ratio
    return ratios


def _added(statistics: Statistics, choice: Ratios, loss: Callable[[Ratios], float]) -> dict[str, float]:
    """The loss that skipping each sublayer adds: relative to the rest of the choice if the sublayer is part of the
    choice, else relative to the whole choice."""
    base = loss(choice)
    return {
        candidate.name: base - loss({name: ratio for name, ratio in choice.items() if name != candidate.name})
        if candidate.name in choice
        else loss({**choice, candidate.name: candidate.ratio}) - base
        for candidate in statistics.candidates
    }


def _exchanged(statistics: Statistics, choice: Ratios, budget: float, loss: Callable[[Ratios], float]) -> Ratios | None:
    """The best of the choices that result from exchanging one skipped sublayer for another, or from no longer skipping
    one if the budget allows this; None if there are none."""
    added, saved = _added(statistics, choice, loss), saved_bytes(statistics, choice)
    skipped = [candidate for candidate in statistics.candidates if candidate.name in choice]
    others = [candidate for candidate in statistics.candidates if candidate.name not in choice]
    gains = {
        (out.name, into): added[out.name] - (added[into.name] if into else 0.0)
        for out in skipped
        for into in (None, *others)
        if saved - out.bytes + (into.bytes if into else 0) >= budget
    }
    trials = []
    for out, into in sorted(gains, key=lambda pair: -gains[pair])[:TRIED]:
        remaining = {name: ratio for name, ratio in choice.items() if name != out}
        trials.append(remaining | ({into.name: into.ratio} if into else {}))
    return min(trials, key=loss, default=None)


def _is_lower(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the mean of `losses` is significantly lower than the mean of the paired `others`."""
    differences = [other - loss for loss, other in zip(losses, others, strict=True)]
    if len(differences) < 2:
        return differences[0] > 0
    return fmean(differences) > SURE * stdev(differences) / len(differences) ** 0.5


def _measured(statistics: Statistics, losses: Mapping[str, float]) -> Statistics:
    """Scale each sublayer's harm to the magnitude of the losses, and average it with the loss measured for the
    sublayer."""
    candidates = []
    for kind in KINDS:
        own = [candidate for candidate in statistics.candidates if candidate.kind == kind]
        # The median is robust against the few sublayers that a model cannot work without.
        scale = [max(losses[candidate.name], 0.0) / candidate.harm for candidate in own if candidate.harm > 0]
        slope = median(scale) if scale else 1.0
        candidates += [
            replace(candidate, harm=(slope * candidate.harm + max(losses[candidate.name], 0.0)) / 2)
            for candidate in own
        ]
    order = {candidate.name: index for index, candidate in enumerate(statistics.candidates)}
    return replace(statistics, candidates=sorted(candidates, key=lambda candidate: order[candidate.name]))


def price(statistics: Statistics, ratios: Ratios) -> float:
    """The largest harm per byte saved among the skipped sublayers; 0 if none is skipped."""
    skipped = (candidate for candidate in statistics.candidates if candidate.name in ratios)
    return max((candidate.harm / candidate.bytes for candidate in skipped), default=0.0)


def within_price(statistics: Statistics, most: float, kind: Kind = "feed-forward") -> Ratios:
    """Select the sublayers of one kind whose harm per byte saved is at most `most`."""
    candidates = (candidate for candidate in statistics.candidates if candidate.kind == kind)
    return {candidate.name: candidate.ratio for candidate in candidates if candidate.harm / candidate.bytes <= most}
