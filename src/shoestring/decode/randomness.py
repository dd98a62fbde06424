"""Random numbers of a request as a function of its seed, a position and a purpose: no state, no order of drawing.

So a text never depends on what else is in the batch, and the same position can be drawn again with the same numbers.
The numbers are those of splitmix64 (Steele, Lea, Flood 2014), whose stream is the hash of a counter: the counter is the
token's number, and the key is a hash of the rest. They are the same on every device.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoestring import native

_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = 2**64 - 1

FEW = 16
"""Only the possible tokens take part in a race where they are fewer than one in so many of the vocabulary."""


class Purpose(IntEnum):
    """What a random number decides; different purposes are independent of each other."""

    TEXT = 1
    """The token of a position, in plain decoding and wherever a text must equal that of plain decoding."""
    DRAFT = 2
    """A drafted token of a round of speculation."""
    ACCEPTANCE = 3
    """Whether a drafted token stays."""
    CORRECTION = 4
    """The token after the last drafted one that stays."""


def key(seed: int, purpose: Purpose, position: int, start: int = 0) -> int:
    """The 64-bit key of a position's numbers.

    `start` is the position at which the round of speculation began. It is part of the key wherever a decision about one
    position may rest on numbers of a later one, as in block verification: those are not drawn again.
    """
    mixed = 0
    for word in (seed, purpose, position, start):
        mixed = _hash((mixed ^ word) + _STEP & _MASK)
    return mixed


def uniform(seed: int, purpose: Purpose, position: int, start: int = 0) -> float:
    """A number from the open interval (0, 1)."""
    return ((_hash(key(seed, purpose, position, start) + _STEP & _MASK) >> 11) + 0.5) * 2.0**-53


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Independent numbers of the exponential distribution of rate 1, float64.

    Args:
        keys: of `as_tensor`, broadcast against `tokens`.
        tokens: int64 numbers of tokens, from 0; a token's number does not depend on which others are asked for.
    """
    mixed = keys + (tokens + 1) * _signed(_STEP)  # int64 products wrap, as the hash wants
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return ((mixed >> 11 & (1 << 53) - 1).double() + 0.5).mul_(2.0**-53).log_().neg_()


def as_tensor(keys: list[int], device: torch.device) -> Tensor:
    """Keys (N, 1), int64, to broadcast against the tokens of N positions."""
    return torch.tensor([[_signed(value)] for value in keys], device=device)


def race(probabilities: Tensor, keys: list[int]) -> list[int]:
    """One token of each position's distribution (N, V): the first to arrive when each token arrives at its rate.

    Taking the argmax of p / E, E exponential, draws from p. Because E does not depend on p, two distributions that
    share the keys give the same token with probability at least (1 - TV) / (1 + TV), TV their total variation
    (Daliri, Musco, Suresh 2025).
    """
    native_race = _native_race() if probabilities.device.type == "cpu" else None
    if native_race is None:
        return race_of_tensors(probabilities, keys)
    probabilities = probabilities.contiguous()
    if probabilities.dtype not in (torch.float32, torch.float64):
        probabilities = probabilities.float()
    first, numbers = (ctypes.c_int64 * len(keys))(), (ctypes.c_uint64 * len(keys))(*keys)
    native_race(
        int(probabilities.dtype is torch.float64), *probabilities.shape, probabilities.data_ptr(), numbers, first
    )
    return list(first)


def race_of_tensors(probabilities: Tensor, keys: list[int]) -> list[int]:
    """The same by torch's functions, on any device."""
    device, V = probabilities.device, probabilities.shape[-1]
    possible = max(int((probabilities > 0).sum(-1).max()), 1)
    if possible * FEW < V:
        probabilities, tokens = probabilities.topk(possible)
    else:
        tokens = torch.arange(V, device=device)
    first = (probabilities / exponentials(as_tensor(keys, device), tokens)).argmax(-1, keepdim=True)
    return tokens.expand(probabilities.shape).gather(-1, first).flatten().tolist()


@cache
def _native_race() -> Any:
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, size, size, pointer, pointer, pointer]
    return native.function("race", types, "tokens are drawn by torch's functions, which are slower than native ones")


def _hash(value: int) -> int:
    """The finaliser of splitmix64, on Python's integers."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ value >> shift) * factor & _MASK
    return value


def _signed(value: int) -> int:
    """The 64 bits of an unsigned integer as the signed one that a tensor holds."""
    return value - 2**64 if value >= 2**63 else value
