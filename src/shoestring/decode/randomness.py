"""Counter-based random numbers without state: each number is a function of a request's seed, a position and a purpose.

A text therefore never depends on other texts in the batch, and the token at a position can be drawn again with the same
numbers. The generator is splitmix64 (Steele et al., 2014), which hashes a key and a counter: the counter is the token
id, and the key is itself a hash of seed, purpose and position. The numbers are the same on every device.
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
"""`race_of_tensors` considers only the tokens of nonzero probability if they are less than 1 / `FEW` of the
vocabulary."""


class Purpose(IntEnum):
    """What a random number decides; numbers for different purposes are independent."""

    TEXT = 1
    """The choice of the token at a position, in plain decoding and under invariant verification, which must give the
    same text."""
    DRAFT = 2
    """The choice of a drafted token."""
    ACCEPTANCE = 3
    """Whether a drafted token is accepted."""
    CORRECTION = 4
    """The choice of the token after the last accepted one."""


def key(seed: int, purpose: Purpose, position: int, start: int = 0) -> int:
    """The 64-bit key of the random numbers of a position.

    `start`, the first position of a round of speculation, gives each round new random numbers. Block verification needs
    new numbers, because its decision about one position uses the numbers of later positions, and these must not be used
    again in the next round.
    """
    mixed = 0
    for word in (seed, purpose, position, start):
        mixed = _hash((mixed ^ word) + _STEP & _MASK)
    return mixed


def uniform(seed: int, purpose: Purpose, position: int, start: int = 0) -> float:
    """A uniform random number from the open interval (0, 1)."""
    return ((_hash(key(seed, purpose, position, start) + _STEP & _MASK) >> 11) + 0.5) * 2.0**-53


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Independent random numbers from the exponential distribution of rate 1, float64.

    Args:
        keys: from `as_tensor`; broadcast against `tokens`.
        tokens: int64 token ids; the random number of a token does not depend on the other tokens.
    """
    mixed = keys + (tokens + 1) * _signed(_STEP)  # int64 products wrap around, as the hash requires
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return ((mixed >> 11 & (1 << 53) - 1).double() + 0.5).mul_(2.0**-53).log_().neg_()


def as_tensor(keys: list[int], device: torch.device) -> Tensor:
    """Keys as an int64 tensor (N, 1), to broadcast against the tokens of N positions."""
    return torch.tensor([[_signed(value)] for value in keys], device=device)


def race(probabilities: Tensor, keys: list[int]) -> list[int]:
    """Draw a token from each position's distribution (N, V) by a race of exponentials.

    If E holds independent exponential numbers, the argmax of p / E has the distribution p. Because E does not depend on
    p, two distributions that share the keys give the same token with probability at least (1 - TV) / (1 + TV), where TV
    is their total variation (Daliri et al., 2025).
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
    """Compute `race` with torch functions, on any device."""
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
    """The native `race`, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, size, size, pointer, pointer, pointer]
    return native.function("race", types, "tokens are drawn by torch's functions, which are slower than native ones")


def _hash(value: int) -> int:
    """Apply the finalizer of splitmix64 to an unsigned 64-bit integer."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ value >> shift) * factor & _MASK
    return value


def _signed(value: int) -> int:
    """Convert an unsigned 64-bit integer to the signed integer with the same bits, which a tensor can hold."""
    return value - 2**64 if value >= 2**63 else value
