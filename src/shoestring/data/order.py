"""Which sample stands at each position of training: a function of the seed alone, so a position is one integer.

The order of epoch e is the sort of splitmix64 (Steele, Lea and Flood, 2014) of (seed, e, sample), so no library
version changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

BLOCK = 10_000
"""Samples over which each source of a mixture has its exact share; weights count in steps of one over this."""
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, of uint64 of any shape."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The samples 0 to `samples` - 1 in the order of `epoch`; int64 (samples,)."""
    stream = np.array([seed & _WORD], np.uint64)
    for word in (epoch & _WORD, _GOLDEN):
        stream = _mix(stream ^ np.uint64(word)) + np.uint64(_GOLDEN)
    keys = _mix(stream + np.arange(1, samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(keys, kind="stable")


class Order(Protocol):
    """An endless sequence of samples."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The samples at `positions`, int64 (n,) from 0 on."""
        ...


class Shuffled:
    """Every sample once an epoch: position p is number p mod N of epoch p div N."""

    def __init__(self, seed: int, samples: int) -> None:
        self.seed, self.samples = seed, samples
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        epochs = positions // self.samples
        samples = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permutation(int(epoch))[positions[here] % self.samples]
        return samples

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self.seed, epoch, self.samples)
        return self._order


class Interleaved:
    """Samples of several sources in the proportion of their weights; each source is shuffled by itself, without end.

    Every `BLOCK` positions hold each source as often as its weight says, in an order drawn anew for each block. So how
    often a source came before any position is known without a count, whatever the position.

    Args:
        lengths: samples of each source. weights: their shares, which need not add up to 1.
    """

    def __init__(self, seed: int, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self.seed = seed
        self.quotas = quotas(weights)
        self.offsets = np.cumsum([0, *lengths[:-1]])
        self.sources = [Shuffled(seed + number, length) for number, length in enumerate(lengths)]
        self._number = -1
        self._block = (np.empty(0, np.int64), np.empty(0, np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        blocks, inside = np.divmod(positions, BLOCK)
        samples = np.empty(len(positions), np.int64)
        for number in np.unique(blocks):
            source_of, before = self._layout(int(number))
            for source, order in enumerate(self.sources):
                here = np.flatnonzero((blocks == number) & (source_of[inside] == source))
                earlier = number * self.quotas[source] + before[inside[here]]
                samples[here] = self.offsets[source] + order.at(earlier)
        return samples

    def _layout(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position of a block, and how often it came before in that block; (BLOCK,) each."""
        if number != self._number:
            source_of = np.repeat(np.arange(len(self.quotas)), self.quotas)[permutation(self.seed, number, BLOCK)]
            before = np.empty(BLOCK, np.int64)
            for source, quota in enumerate(self.quotas):
                before[source_of == source] = np.arange(quota)
            self._number, self._block = number, (source_of, before)
        return self._block


def quotas(weights: Sequence[float]) -> np.ndarray:
    """How often each source stands in a block: its exact share, rounded so that they add up (largest remainders)."""
    shares = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts
