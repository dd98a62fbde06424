"""Seeds the random draws of data sets, so that they depend only on the run's seed and the sample's position.

As a result, augmentation is the same for any number of loading processes and after a resume. Augmentation differs
between ranks, epochs and seeds, and does not disturb the random numbers of training (dropout).
"""

from __future__ import annotations

import hashlib
import random
from types import TracebackType
from typing import Self

import numpy as np
import torch


def seed_of(*words: int | str) -> int:
    """A 63-bit seed derived from the words by a hash."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest()) >> 1


class Draws:
    """Context in which the global random number generators of torch (CPU), NumPy and Python are reseeded for each
    sample. On exit the generators are restored to their earlier states.

    Args:
        stream: names the sequence of samples, such as ("training", seed); each position in each stream has different
            random numbers.
    """

    def __init__(self, *stream: int | str) -> None:
        self.stream = stream

    def begin(self, position: int) -> None:
        """Reseed all generators for the sample at this position."""
        seed = seed_of(*self.stream, position)
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        random.seed(seed)

    def __enter__(self) -> Self:
        self._before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        of_torch, of_numpy, of_python = self._before
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
