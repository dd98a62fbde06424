"""Baselines for a language model: bits per byte of compressors and an n-gram model on the same held-out text.

All three baselines (gzip, xz and the n-gram model) report bits per byte of the same bytes: the held-out documents,
joined by a separator byte.
"""

from __future__ import annotations

import gzip
import lzma

import numpy as np

from shoestring.core.errors import ConfigError
from shoestring.data import BYTES

_LONGEST = 8
"""Maximum length of an n-gram in bytes; n-grams are stored as 64-bit integers."""


def gzip_bits(texts: bytes) -> float:
    """Bits per byte of `texts` under gzip at level 9, without any training text."""
    return 8 * len(gzip.compress(texts, 9, mtime=0)) / max(1, len(texts))


def xz_bits(texts: bytes) -> float:
    """Bits per byte of `texts` under xz at level 9, without any training text."""
    return 8 * len(lzma.compress(texts, preset=9)) / max(1, len(texts))


def witten_bell_bits(train: bytes, held_out: bytes, order: int = 5) -> float:
    """Bits per byte of `held_out` under an interpolated Witten-Bell n-gram model of the bytes of `train`.

    Documents are joined by a separator byte that occurs in no text (`Corpus.train_texts`). The model predicts the
    separator like any other byte, contexts may contain it, and it is included in the average.
    """
    return float(-np.log2(witten_bell(train, held_out, order)).mean())


def witten_bell(train: bytes, held_out: bytes, order: int = 5) -> np.ndarray:
    """Probability of each byte of `held_out` given the `order` - 1 bytes before it; float64 (len(held_out),).

    Let c(h) be the number of times that context h occurs in training and T(h) the number of different bytes that occur
    after it. Starting from the uniform distribution, probabilities are computed for longer and longer contexts (Witten
    and Bell, 1991; Chen and Goodman, 1998, equation 17):

        P(w | h) = (c(h w) + T(h) P(w | h')) / (c(h) + T(h)),    h' = h without its oldest byte

    and P(w | h) = P(w | h') if h does not occur in training. Both texts are padded with zero bytes in front. N-grams of
    one length are stored as sorted 64-bit integers, which is exact for orders up to 8. They take about 40 bytes of
    memory for each byte of training text.
    """
    if not 1 <= order <= _LONGEST:
        raise ConfigError(
            f"a Witten-Bell model cannot have the order {order}", hint=f"orders 1 to {_LONGEST} are possible"
        )
    probability = np.full(len(held_out), 1 / BYTES)
    if not train or not held_out:
        return probability
    for length in range(1, order + 1):
        grams, counts = np.unique(_grams(train, length), return_counts=True)
        contexts, starts, types = np.unique(grams >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, starts)
        wanted, where = np.unique(_grams(held_out, length), return_inverse=True)
        # Each distinct n-gram is looked up only once, because real text repeats most n-grams.
        seen = _look_up(grams, counts, wanted)[where]
        follow, total = (_look_up(contexts, values, wanted >> 8)[where] for values in (types, totals))
        known = total > 0
        probability[known] = ((seen + follow * probability) / np.maximum(1, total + follow))[known]
    return probability


def _grams(text: bytes, length: int) -> np.ndarray:
    """For each byte of `text`, the n-gram of `length` bytes that ends with it, as a big-endian integer;
    (len(text),)."""
    dtype = next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if np.dtype(kind).itemsize >= length)
    padded = np.frombuffer(bytes(length - 1) + text, np.uint8)
    codes = np.zeros(len(text), dtype)
    for at in range(length):
        if at:
            codes <<= dtype(8)
        codes |= padded[at : at + len(text)]
    return codes


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Look up the keys `wanted` in the map from sorted `keys` to `values`; the result is 0 where a key is absent."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
