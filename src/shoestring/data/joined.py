"""Joins several token data sets to one, such as the training data of a mixture."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from shoestring.data.chats import ChatDataset
from shoestring.data.order import Interleaved, Order, Shuffled
from shoestring.data.tokens import TokenDataset


class Joined(Dataset[dict[str, Tensor]]):
    """A data set with the samples of several token data sets, concatenated; training draws samples in proportion to
    `weights`.

    Args:
        weights: a proportion for each data set; if empty, every sample is used once an epoch.
    """

    draws = False
    """See `Loader`."""

    def __init__(self, parts: Sequence[Tokens], weights: Sequence[float] = ()) -> None:
        self.parts, self.weights = tuple(parts), tuple(weights)
        self.sequence = parts[0].sequence
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def order(self, seed: int) -> Order:
        """The order in which training uses the samples."""
        if not self.weights:
            return Shuffled(seed, len(self))
        return Interleaved(seed, [len(part) for part in self.parts], self.weights)

    @property
    def fingerprint(self) -> str:
        """Identifies the samples and their proportions: two fingerprints are equal if and only if samples and
        proportions are."""
        return self._hash([part.fingerprint for part in self.parts])

    @property
    def content(self) -> str:
        """Identifies the tokens and their proportions; does not depend on how the tokens are cut into samples."""
        return self._hash([part.content for part in self.parts])

    def _hash(self, parts: list[str]) -> str:
        return hashlib.sha256(json.dumps([parts, self.weights]).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def skipped(self) -> int:
        return sum(part.skipped for part in self.parts)

    @property
    def duplicates(self) -> int:
        return sum(part.duplicates for part in self.parts)

    @property
    def notes(self) -> Iterator[str]:
        """Sentences of all joined data sets for the user, about how records became samples."""
        return (note for part in self.parts for note in part.notes)

    @property
    def targets(self) -> int:
        return sum(part.targets for part in self.parts)

    @property
    def targets_per_byte(self) -> float:
        """Mean number of targets per byte of text, for samples drawn in these proportions; 0 if the number of bytes is
        unknown."""
        # The result is a harmonic mean, because the weights are proportions of targets and not of bytes.
        shares = self.weights or [part.targets for part in self.parts]
        rates = [part.targets_per_byte for part in self.parts]
        return sum(shares) / sum(w / rate for w, rate in zip(shares, rates, strict=True)) if all(rates) else 0.0

    @property
    def ids(self) -> np.ndarray:
        """All tokens of all data sets, (tokens,); the array is in memory."""
        return np.concatenate([part.ids for part in self.parts])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        samples = []
        for index in indices:
            number = bisect_right(self._starts, index) - 1
            samples += self.parts[number].__getitems__([index - self._starts[number]])
        return samples


Tokens = TokenDataset | ChatDataset | Joined
