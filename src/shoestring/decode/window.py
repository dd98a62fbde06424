"""The part of a text that is seen, and the part that two texts share."""

from __future__ import annotations

from collections.abc import Sequence


def window_start(length: int, window: int) -> int:
    """The first token still seen after `length` tokens: 0 until `window` is full, then steps of a quarter of it."""
    stride = max(1, window // 4)
    return max(0, -(-(length - window) // stride) * stride)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
