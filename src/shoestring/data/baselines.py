"""Baselines for a language model: bits per byte of compressors and an n-gram model on the same held-out text.

All three report bits per byte of the same bytes: the held-out documents, joined by a separator byte.
"""

from __future__ import annotations

import gzip
import lzma

import numpy as np

from shoestring.core.errors import ConfigError
from shoestring.data import BYTES

_LONGEST = 8
"""Bytes that fit one 64-bit code."""


def gzip_bits(texts: bytes) -> float:
    """Bits per byte of `texts` under gzip at level 9; it has seen no training text."""
    return 8 * len(gzip.compress(texts, 9, mtime=0)) / max(1, len(texts))


def xz_bits(texts: bytes) -> float:
    """Bits per byte of `texts` under xz at level 9; it has seen no training text."""
    return 8 * len(lzma.compress(texts, preset=9)) / max(1, len(texts))


def witten_bell_bits(train: bytes, held_out: bytes, order: int = 5) -> float:
    """Bits per byte of `held_out` under an interpolated Witten-Bell n-gram model of the bytes of `train`.

    Documents are joined by a separator byte that occurs in no text (`Corpus.train_texts`): the model predicts it like
    any other byte, sees it where a context reaches over the start of a document, and counts it in both averages.
    """
    return float(-np.log2(witten_bell(train, held_out, order)).mean())


def witten_bell(train: bytes, held_out: bytes, order: int = 5) -> np.ndarray:
    """Probability of each byte of `held_out` given the `order` - 1 before it; float64 (len(held_out),).

    With c(h) the times context h was seen in training and T(h) the number of different bytes seen after it (Witten and
    Bell, 1991; Chen and Goodman, 1998, equation 17), from the uniform distribution upwards:

        P(w | h) = (c(h w) + T(h) P(w | h')) / (c(h) + T(h)),    h' = h without its oldest byte

    and P(w | h) = P(w | h') where h was never seen. Before the first byte of either text stand zero bytes. The
    n-grams of one length are sorted 64-bit integers, exact for orders up to 8; memory is some 40 bytes a byte of
    training text.
    """
    if not 1 <= order <= _LONGEST:
        raise ConfigError(f"a Witten-Bell model of order {order}", hint=f"orders 1 to {_LONGEST} are possible")
    probability = np.full(len(held_out), 1 / BYTES)
    if not train or not held_out:
        return probability
    for length in range(1, order + 1):
        grams, counts = np.unique(_grams(train, length), return_counts=True)
        contexts, starts, types = np.unique(grams >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, starts)
        wanted, where = np.unique(_grams(held_out, length), return_inverse=True)
        seen = _look_up(grams, counts, wanted)[where]
        follow, total = (_look_up(contexts, values, wanted >> 8)[where] for values in (types, totals))
        known = total > 0
        probability[known] = ((seen + follow * probability) / np.maximum(1, total + follow))[known]
    return probability


def _grams(text: bytes, length: int) -> np.ndarray:
    """The `length` bytes that end at each byte of `text` as one integer, oldest byte highest; (len(text),)."""
    dtype = next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if np.dtype(kind).itemsize >= length)
    padded = np.frombuffer(bytes(length - 1) + text, np.uint8)
    codes = np.zeros(len(text), dtype)
    for at in range(length):
        if at:
            codes <<= dtype(8)
        codes |= padded[at : at + len(text)]
    return codes


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Value of each of `wanted` in the map from sorted `keys` to `values`, 0 where it has none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
