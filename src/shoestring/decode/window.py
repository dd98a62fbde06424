"""The part of a text that is in the context, and the common prefix of two texts."""

from __future__ import annotations

from collections.abc import Sequence


def window_start(length: int, window: int) -> int:
    """Index of the first token in the context after `length` tokens: 0 until `window` is full; it then advances by a
    quarter of the window at a time."""
    stride = max(1, window // 4)
    return max(0, -(-(length - window) // stride) * stride)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
