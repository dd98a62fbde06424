"""The order of samples in training: maps positions to samples, depending only on the seed.

In epoch e, samples are sorted by splitmix64 (Steele, Lea and Flood, 2014) of (seed, e, sample). The function is
implemented here, so that no library version changes the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

BLOCK = 10_000
"""Number of consecutive positions in which each source of a mixture has exactly its share; the resolution of weights is
1 / BLOCK."""
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, elementwise on uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The sample indices 0 to `samples` - 1 in the order of this epoch; int64 (samples,)."""
    stream = np.array([seed & _WORD], np.uint64)
    for word in (epoch & _WORD, _GOLDEN):
        stream = _mix(stream ^ np.uint64(word)) + np.uint64(_GOLDEN)
    keys = _mix(stream + np.arange(1, samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(keys, kind="stable")


class Order(Protocol):
    """An endless sequence of samples with random access."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The sample indices at `positions`, int64 (n,), which count from 0."""
        ...


class Shuffled:
    """An order in which every sample occurs once per epoch: position p is the (p mod N)-th sample of epoch p div N."""

    def __init__(self, seed: int, samples: int) -> None:
        self.seed, self.samples = seed, samples
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        epochs = positions // self.samples
        samples = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            if epoch != self._epoch:  # sorting a large epoch takes seconds, so the result is cached
                self._epoch, self._order = int(epoch), permutation(self.seed, int(epoch), self.samples)
            here = epochs == epoch
            samples[here] = self._order[positions[here] % self.samples]
        return samples


class Interleaved:
    """An order that mixes the samples of several sources in proportion to weights; each source is shuffled and repeated
    separately.

    In every block of `BLOCK` positions, each source occurs exactly in proportion to its weight, in an order that is
    shuffled for each block. The number of a source's samples before a block therefore follows from the block's number,
    without counting from the start.

    Args:
        lengths: number of samples of each source. weights: proportions, which need not add up to 1.
    """

    def __init__(self, seed: int, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self.seed = seed
        self.quotas = quotas(weights)
        self.offsets = np.cumsum([0, *lengths[:-1]])
        self.sources = [Shuffled(seed + number, length) for number, length in enumerate(lengths)]
        self._number = -1
        self._block = (np.empty(0, np.int64), np.empty(0, np.int64))
        """Two arrays (BLOCK,) for block `_number`: the source of each position, and how often this source occurs
        earlier in the block."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        blocks, inside = np.divmod(positions, BLOCK)
        samples = np.empty(len(positions), np.int64)
        for number in map(int, np.unique(blocks)):
            if number != self._number:
                source_of = np.repeat(np.arange(len(self.quotas)), self.quotas)[permutation(self.seed, number, BLOCK)]
                before = np.empty(BLOCK, np.int64)
                for source, quota in enumerate(self.quotas):
                    before[source_of == source] = np.arange(quota)
                self._number, self._block = number, (source_of, before)
            source_of, before = self._block
            for source, order in enumerate(self.sources):
                here = np.flatnonzero((blocks == number) & (source_of[inside] == source))
                earlier = number * self.quotas[source] + before[inside[here]]
                samples[here] = self.offsets[source] + order.at(earlier)
        return samples


def quotas(weights: Sequence[float]) -> np.ndarray:
    """The number of positions of each source in a block: its share, rounded by the largest remainder method so that the
    sum is `BLOCK`."""
    shares = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts
