"""Published rules for skipping, under the interface of ours, each made to save at least the bytes asked for.

Rules that skip whole layers skip as few as reach the budget. As published, layers are left out without compensation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from shoestring.core.errors import ConfigError
from shoestring.decode.skipping.choice import (
    Ratios,
    SkipCandidate,
    Statistics,
    check_reachable,
    in_order_of_similarity,
    saved_bytes,
)


def early_exit(statistics: Statistics, budget: float) -> Ratios:
    """The last layers."""
    return _layers(statistics, budget, reversed(range(len(statistics.blocks))))


def skip_decode(statistics: Statistics, budget: float, progress: float = 0.5) -> Ratios:
    """SkipDecode (Del Corro et al., 2023): layers from the second on, more of them the further the text is.

    The number skipped rises linearly over the text, from one layer to the number that saves the budget on average.

    Args:
        progress: the share of the text that is generated.
    """
    count = len(statistics.blocks)
    mean = budget / (sum(each.bytes for each in statistics.candidates) / count)
    most = min(count - 1, max(1.0, 2 * mean - 1))
    skipped = math.ceil(1 + progress * (most - 1) - 1e-9) if budget > 0 else 0
    return _without(statistics, range(1, 1 + skipped))


def unified_skipping(statistics: Statistics, budget: float) -> Ratios:
    """Unified layer skipping (Liu et al., 2024): layers at equal distances, the same ones for every token."""
    count = len(statistics.blocks)
    check_reachable(statistics, budget)
    for skipped in range(1, count):
        distance = count / skipped
        ratios = _without(
            statistics, {min(count - 1, int(distance * index + distance / 2)) for index in range(skipped)}
        )
        if saved_bytes(statistics, ratios) >= budget:
            return ratios
    return _without(statistics, range(count))


def layer_drop(statistics: Statistics, budget: float) -> Ratios:
    """Layers of the least block influence, 1 - cos(x, y) (Men et al., ShortGPT, 2024)."""
    order = sorted(range(len(statistics.blocks)), key=lambda layer: -statistics.blocks[layer])
    return _layers(statistics, budget, order)


def released_adaskip(statistics: Statistics, budget: float) -> Ratios:
    """AdaSkip as its authors released it: sublayers in the order of their similarity, however many bytes each is."""
    return in_order_of_similarity(statistics, budget)


def greedy_oracle(statistics: Statistics, budget: float) -> Ratios:
    """One sublayer after another, each the one whose skipping raises the measured loss least for each byte saved.

    Raises:
        ConfigError: the statistics have no loss.
    """
    losses = statistics.losses
    if losses is None:
        raise ConfigError("the greedy oracle needs a loss to measure")
    check_reachable(statistics, budget)
    ratios: dict[str, float] = {}
    now = fmean(losses(ratios))
    while (left := budget - saved_bytes(statistics, ratios)) > 0:
        rest = [each for each in statistics.candidates if each.name not in ratios]
        after = [fmean(losses({**ratios, each.name: each.ratio})) for each in rest]
        # What a sublayer saves beyond the budget does not count for it.
        value = [(loss - now) / min(left, each.bytes) for each, loss in zip(rest, after, strict=True)]
        index = value.index(min(value))
        ratios[rest[index].name], now = rest[index].ratio, after[index]
    return ratios


def _layers(statistics: Statistics, budget: float, order: Iterable[int]) -> Ratios:
    groups = ([each for each in statistics.candidates if each.layer == layer] for layer in order)
    return dict.fromkeys(_until(statistics, budget, groups), 1.0)


def _without(statistics: Statistics, layers: Iterable[int]) -> Ratios:
    left_out = set(layers)
    return {each.name: 1.0 for each in statistics.candidates if each.layer in left_out}


def _until(statistics: Statistics, budget: float, groups: Iterable[list[SkipCandidate]]) -> Ratios:
    """As many of the groups, in their order, as save the budget."""
    check_reachable(statistics, budget)
    ratios: dict[str, float] = {}
    for group in groups:
        if saved_bytes(statistics, ratios) >= budget:
            break
        ratios |= {each.name: each.ratio for each in group}
    return ratios
