"""MVUE: minimum-variance unbiased 2:4 estimates of output gradients, so that weight gradients are sparse products too.

Two of every four gradients are kept. A gradient is kept with a probability p, and then divided by p. The variance is
lowest if p is proportional to the magnitude and capped at 1 (Chmiel et al., 2023, "Minimum Variance Unbiased N:M
Sparsity for the Neural Gradients"). One random number u in [0, 1) selects both entries: laid end to end, the four
probabilities are intervals that fill [0, 2), and the two entries whose intervals contain u and 1 + u are kept
(systematic sampling, Madow 1949). If fewer than two entries are nonzero, the probabilities add up to less than 2, and
only the nonzero entries are kept.

The random number of a group is a bijection of the group's index, mixed with the key of the call. No two groups of a
call share a random number, and results do not depend on how groups are divided among threads or ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.sparse import kernels

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of splitmix64 (Steele, Lea and Flood, 2014)
FINAL = ((16, 0x7FEB352D), (15, 0x846CA68B))  # 32-bit finaliser (Wellons, 2018): (shift, factor) twice, then LAST_SHIFT
LAST_SHIFT = 16


def mvue(x: Tensor, key: Tensor, *, first: int = 0) -> Tensor:
    """Draw an unbiased estimate of `x` in which at most two of every four consecutive entries of a column are nonzero.

    Args:
        x: (rows, columns). If the number of rows is not a multiple of four, the last group is smaller.
        key: int32 (2,) from `draw_key`; use a new key for every call.
        first: index of the first group of four rows; not 0 if other ranks hold earlier rows.

    Returns:
        (rows, columns), in the type of `x`.
    """
    if kernels.usable_in_single(x):
        return kernels.mvue(x, key, first)
    rows = len(x)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    groups = F.pad(wide, (0, 0, 0, -rows % 4)).unflatten(0, (-1, 4))  # (groups, 4, columns)
    magnitudes = groups.abs()
    unit = unit_of(*magnitudes.unbind(1))[:, None]
    probabilities = (magnitudes / unit).clamp_max(1)
    reach = probabilities.cumsum(1)  # end of each entry's interval
    # The number of points, out of 1 - u and 2 - u, that lie before the end of each interval.
    crossed = (reach + uniforms(key, groups.shape[0], x.shape[1], first).to(wide)[:, None]).floor().clamp_max(2)
    # Rounding must not put both points into the first interval, nor leave the second point beyond the last interval
    # if the probabilities add up to 2.
    crossed[:, 0].clamp_max_(1)
    crossed[:, 3].masked_fill_(unit[:, 0] > torch.finfo(wide.dtype).tiny, 2)
    crossed[:, 1:] -= crossed[:, :-1].clone()  # now the number of points within each interval
    crossed.clamp_max_(1)
    estimate = groups.sign() * torch.maximum(magnitudes, unit) * crossed
    return estimate.flatten(0, 1)[:rows].to(x.dtype)


@torch.library.custom_op("shoestring::mvue_by_columns", mutates_args=())
def mvue_by_columns(x: Tensor, key: Tensor, first: int) -> Tensor:
    """The contiguous transpose of `mvue(x, key, first=first)`, for the product with a layer's inputs.

    On a GPU this is one pass over `x` in any layout, with a memory traffic of 4 bytes per 16-bit entry; with a separate
    transpose it would be 8 bytes.
    """
    if kernels.usable_in_single(x):
        return kernels.mvue(x, key, first, by_columns=True).t()
    return mvue(x, key, first=first).t().contiguous()


@mvue_by_columns.register_fake
def _(x: Tensor, key: Tensor, first: int) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def unit_of(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The unit of a group of four magnitudes: an entry is kept with probability min(magnitude / unit, 1).

    The four probabilities add up to two, except where the three smallest magnitudes are (nearly) zero: the unit is then
    the smallest normal number, and the sum is below two. The three smallest magnitudes are added first, because
    rounding would lose them if they were added to a large fourth magnitude.
    """
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    higher, lower = torch.maximum(c, d), torch.minimum(c, d)
    others = low + lower + torch.minimum(high, higher)
    total = others + torch.maximum(high, higher)
    return torch.minimum(others, total / 2).clamp_min(torch.finfo(total.dtype).tiny)


def draw_key(seed: int, call: Tensor) -> Tensor:
    """The random key of one call, by splitmix64; different for every seed and call.

    Args:
        call: index of the call; int64 0-d.

    Returns:
        int32 (2,).
    """
    z = call * _signed(_GOLDEN) + _signed(seed * _MIX[0] + 1)
    z = (z ^ _shifted(z, 30)) * _signed(_MIX[0])
    z = (z ^ _shifted(z, 27)) * _signed(_MIX[1])
    z = z ^ _shifted(z, 31)
    return torch.stack([z, z >> 32]).to(torch.int32)


@torch.library.custom_op("shoestring::next_key", mutates_args={"calls"})
def next_key(calls: Tensor, seed: int) -> Tensor:
    """Add 1 to the call counter `calls` (int64, 0-d), and return the key of the call.

    This is a custom operator because torch.compile would otherwise recompute the key in the backward pass, when the
    counter has already changed.
    """
    calls.add_(1)
    return draw_key(seed, calls)


@next_key.register_fake
def _(calls: Tensor, seed: int) -> Tensor:
    return calls.new_empty(2, dtype=torch.int32)


def uniforms(key: Tensor, groups: int, columns: int, first: int = 0) -> Tensor:
    """A random number of 24 bits in [0, 1) for each group of four rows and each column; fp32 (groups, columns)."""
    numbers = torch.arange(groups * columns, dtype=torch.int32, device=key.device) + _signed(first * columns, 32)
    return (_mixed(_mixed(numbers ^ key[0]) ^ key[1]) >> 8 & 0xFFFFFF).float().mul_(2.0**-24).view(groups, columns)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int32. Bit masks make the shifts logical, because torch's shift of a negative number copies the
    sign bit."""
    for shift, factor in FINAL:
        x = (x ^ (x >> shift & ((1 << 32 - shift) - 1))) * _signed(factor, 32)
    return x ^ (x >> LAST_SHIFT & 0xFFFF)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return x >> bits & ((1 << 64 - bits) - 1)


def _signed(word: int, bits: int = 64) -> int:
    """The low `bits` bits of `word` as a signed integer."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word
