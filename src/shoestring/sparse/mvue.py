"""Unbiased 2:4 estimates of output gradients, of minimum variance, so that weight gradients are sparse products too.

Of four gradients, two are kept with probability p each and divided by p. Variance is least where p is in proportion to
the magnitude and at most 1 (Chmiel et al., 2023, "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients").
Both are drawn by one random number: laid end to end, the four probabilities fill [0, 2), and those that cover u or
1 + u are kept (systematic sampling, Madow 1949).

Random numbers are a bijection of a group's number, mixed with the key of the call. So no two groups of a call share
one, whatever their number, and a draw does not depend on how the work is cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.sparse import kernels

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of splitmix64 (Steele, Lea and Flood, 2014)
FINAL = ((16, 0x7FEB352D), (15, 0x846CA68B))  # a 32-bit finaliser (Wellons, 2018): shift and factor, twice, then shift
LAST_SHIFT = 16


def mvue(x: Tensor, key: Tensor, *, first: int = 0) -> Tensor:
    """An unbiased estimate of `x` with at most two entries of every four consecutive rows that are not zero.

    Args:
        x: (rows, columns); of a number of rows that is no multiple of four, the last group is smaller.
        key: int32 (2,), of `draw_key`: another one for every call.
        first: the number of the first group of four rows, where other ranks have those before.

    Returns:
        Of the shape and type of `x`.
    """
    if kernels.usable_in_single(x):
        return kernels.mvue(x, key, first)
    rows = len(x)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    groups = F.pad(wide, (0, 0, 0, -rows % 4)).unflatten(0, (-1, 4))  # (groups, 4, columns)
    magnitudes = groups.abs()
    unit = unit_of(*magnitudes.unbind(1))[:, None]
    chances = (magnitudes / unit).clamp_max(1)
    reach = chances.cumsum(1)
    crossed = (reach + uniforms(key, groups.shape[0], x.shape[1], first).to(wide)[:, None]).floor().clamp_max(2)
    crossed[:, 3] = 2  # whatever rounding left
    crossed[:, 1:] -= crossed[:, :-1].clone()
    estimate = groups.sign() * torch.maximum(magnitudes, unit) * crossed
    return estimate.flatten(0, 1)[:rows].to(x.dtype)


@torch.library.custom_op("shoestring::mvue_by_columns", mutates_args=())
def mvue_by_columns(x: Tensor, key: Tensor, first: int) -> Tensor:
    """The transpose of `mvue(x, key, first=first)`, contiguous: as the product with a layer's inputs takes it.

    On a GPU one pass over `x`, in whatever layout, of 4 bytes an entry in 16 bits; with a transpose after it, 8.
    """
    if kernels.usable_in_single(x):
        return kernels.mvue(x, key, first, by_columns=True).t()
    return mvue(x, key, first=first).t().contiguous()


@mvue_by_columns.register_fake
def _(x: Tensor, key: Tensor, first: int) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def unit_of(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The magnitude from which on an entry is kept for certain, of the magnitudes of the four.

    Smaller ones are kept with probability magnitude / unit. The probabilities of all four add up to two. The three
    smallest are added up by themselves: beside a large fourth one they would vanish from the sum of all.
    """
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    higher, lower = torch.maximum(c, d), torch.minimum(c, d)
    others = low + lower + torch.minimum(high, higher)
    total = others + torch.maximum(high, higher)
    return torch.minimum(others, total / 2).clamp_min(torch.finfo(total.dtype).tiny)


def draw_key(seed: int, call: Tensor) -> Tensor:
    """The key of one call; int32 (2,).

    Args:
        call: int64 0-d, the number of the call. Seeds and calls give different keys.
    """
    z = call * _signed(_GOLDEN) + _signed(seed * _MIX[0] + 1)
    z = (z ^ _shifted(z, 30)) * _signed(_MIX[0])
    z = (z ^ _shifted(z, 27)) * _signed(_MIX[1])
    z = z ^ _shifted(z, 31)
    return torch.stack([z, z >> 32]).to(torch.int32)


@torch.library.custom_op("shoestring::next_key", mutates_args={"calls"})
def next_key(calls: Tensor, seed: int) -> Tensor:
    """The key of the next call; counts it in `calls`, int64 0-d.

    An operator of its own because torch.compile would compute the key again for the backward pass, from the count
    that is one higher by then.
    """
    calls.add_(1)
    return draw_key(seed, calls)


@next_key.register_fake
def _(calls: Tensor, seed: int) -> Tensor:
    return calls.new_empty(2, dtype=torch.int32)


def uniforms(key: Tensor, groups: int, columns: int, first: int = 0) -> Tensor:
    """A random number in [0, 1) for each group of a column; fp32 (groups, columns), of 24 bits."""
    numbers = torch.arange(groups * columns, dtype=torch.int32, device=key.device) + _signed(first * columns, 32)
    return (_mixed(_mixed(numbers ^ key[0]) ^ key[1]) >> 8 & 0xFFFFFF).float().mul_(2.0**-24).view(groups, columns)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int32; shifts are of the bits, not of the number."""
    for shift, factor in FINAL:
        x = (x ^ (x >> shift & ((1 << 32 - shift) - 1))) * _signed(factor, 32)
    return x ^ (x >> LAST_SHIFT & 0xFFFF)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return x >> bits & ((1 << 64 - bits) - 1)


def _signed(word: int, bits: int = 64) -> int:
    """The integer of `bits` bits, with a sign, that has the low bits of `word`."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word
