"""Inputs that draws from a normal distribution never hold: exact zeros, ones, ties, tiny numbers and lone entries.

Statistical tests of every area take them beside their random ones. A property that holds for generic numbers alone (a
group of four has two entries that are not zero, no two entries are equal, a largest one exists) fails here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

TINY, DENORMAL = 2.0**-125, 2.0**-140
"""Of fp32: near the smallest normal number, and below it."""
ENTRIES = (0.0, 1.0, -5.0, 2.0**-20, DENORMAL)
"""Zero, one, a larger number with a sign, one that vanishes beside it, and one without a reciprocal."""
SHAPES = ("zeros", "ones", "ties", "lone first", "lone last", "negative zeros", "tiny", "denormal", "one huge")


def groups(entries: Sequence[float] = ENTRIES, size: int = 4) -> Tensor:
    """Every group of `size` of these entries, ties and lone ones among them; fp32 (groups, size)."""
    return torch.tensor(list(itertools.product(entries, repeat=size)))


def vector(shape: str, size: int) -> Tensor:
    """A vector of one of `SHAPES`; fp32 (size,)."""
    x = torch.zeros(size)
    match shape:
        case "zeros":
            pass
        case "ones":
            x.fill_(1)
        case "ties":
            x[::2], x[1::2] = 0.25, -0.25
        case "lone first":
            x[0] = 3
        case "lone last":
            x[-1] = 3
        case "negative zeros":
            x.fill_(-0.0)
        case "tiny":
            x.fill_(TINY)
        case "denormal":
            x.fill_(DENORMAL)
        case "one huge":
            x.fill_(2.0**-20)
            x[-1] = 2.0**100
        case _:
            raise ValueError(shape)
    return x
