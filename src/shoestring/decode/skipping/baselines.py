"""Published rules for choosing what to skip, as functions of the type `choice.Rule`; each rule avoids at least the
requested bytes, `skip_decode` on average over a text.

Rules that skip whole layers skip the fewest layers that meet the budget. As in the publications, these rules do not
rescale the residual stream to compensate for skipped sublayers (r = 1).
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
    """Early exit: skips the last layers."""
    return _layers(statistics, budget, reversed(range(len(statistics.blocks))))


def skip_decode(statistics: Statistics, budget: float, progress: float = 0.5) -> Ratios:
    """SkipDecode (Del Corro et al., 2023): skips layers from the second one on; the number grows with the text.

    The number of skipped layers rises linearly over the text, starting with one layer, so that the budget is met on
    average.

    Args:
        progress: fraction of the text that has been generated.
    """
    count = len(statistics.blocks)
    mean = budget / (sum(candidate.bytes for candidate in statistics.candidates) / count)
    most = min(count - 1, max(1.0, 2 * mean - 1))
    skipped = math.ceil(1 + progress * (most - 1) - 1e-9) if budget > 0 else 0
    return _without(statistics, range(1, 1 + skipped))


def unified_skipping(statistics: Statistics, budget: float) -> Ratios:
    """Unified layer skipping (Liu et al., 2024): skips layers at equal distances, the same layers for every token."""
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
    """ShortGPT (Men et al., 2024): skips the layers with the least block influence, 1 - cos(x, y), where x and y are
    the layer's input and output."""
    order = sorted(range(len(statistics.blocks)), key=lambda layer: -statistics.blocks[layer])
    return _layers(statistics, budget, order)


def released_adaskip(statistics: Statistics, budget: float) -> Ratios:
    """AdaSkip as its authors released it: skips the sublayers whose input and output are most similar, regardless of
    their bytes."""
    return in_order_of_similarity(statistics, budget)


def greedy_oracle(statistics: Statistics, budget: float) -> Ratios:
    """A greedy oracle: repeatedly skips the sublayer that raises the measured loss least per byte saved.

    Raises:
        ConfigError: the statistics cannot measure losses.
    """
    losses = statistics.losses
    if losses is None:
        raise ConfigError("the greedy oracle needs statistics that measure losses")
    check_reachable(statistics, budget)
    ratios: dict[str, float] = {}
    now = fmean(losses(ratios))
    while (left := budget - saved_bytes(statistics, ratios)) > 0:
        rest = [candidate for candidate in statistics.candidates if candidate.name not in ratios]
        after = [fmean(losses({**ratios, candidate.name: candidate.ratio})) for candidate in rest]
        # Bytes that a sublayer saves beyond the budget do not count.
        value = [(loss - now) / min(left, candidate.bytes) for candidate, loss in zip(rest, after, strict=True)]
        index = value.index(min(value))
        ratios[rest[index].name], now = rest[index].ratio, after[index]
    return ratios


def _layers(statistics: Statistics, budget: float, order: Iterable[int]) -> Ratios:
    """Skip layers in this order, with r = 1, until the budget is met."""
    groups = ([candidate for candidate in statistics.candidates if candidate.layer == layer] for layer in order)
    return dict.fromkeys(_until(statistics, budget, groups), 1.0)


def _without(statistics: Statistics, layers: Iterable[int]) -> Ratios:
    """Skip all sublayers of some layers, with r = 1."""
    left_out = set(layers)
    return {candidate.name: 1.0 for candidate in statistics.candidates if candidate.layer in left_out}


def _until(statistics: Statistics, budget: float, groups: Iterable[list[SkipCandidate]]) -> Ratios:
    """Skip groups of sublayers in this order until the budget is met."""
    check_reachable(statistics, budget)
    ratios: dict[str, float] = {}
    for group in groups:
        if saved_bytes(statistics, ratios) >= budget:
            break
        ratios |= {candidate.name: candidate.ratio for candidate in group}
    return ratios
