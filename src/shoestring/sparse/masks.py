"""Which weights a 2:4 mask keeps: two of every four along a row, or along rows and columns of 4×4 tiles at once.

A mask is a bool tensor of its weight's shape, true where a weight is kept. Magnitudes decide everywhere; the signed
values that torch's own pruning compares by default are here under a name of their own, as a baseline.

A transposable mask (Hubara et al., 2021) has two kept entries in every row and every column of each 4×4 tile. There
are 90 such patterns, so a tile's mask is one byte, its code.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import Literal

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.sparse import kernels

BLOCK = 8192
"""Tiles that are scored at a time: their 90 scores each stay in the processor's cache."""


def row_mask(scores: Tensor) -> Tensor:
    """The mask of the two largest magnitudes of every four consecutive entries of a row; of equal ones, the first.

    Args:
        scores: (…, columns), weights or a metric of them.

    Raises:
        ConfigError: the columns are not a multiple of four.
    """
    _require_multiple_of_four(scores, columns=True)
    if kernels.usable(scores):
        return kernels.row_mask(scores)
    # Six comparisons order four entries, the first of equals before the others; who wins two of three is kept.
    a, b, c, d = scores.detach().abs().unflatten(-1, (-1, 4)).movedim(-1, 0).contiguous()
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    kept = _two_of(ab, ac, ad), _two_of(~ab, bc, bd), _two_of(~ac, ~bc, cd), _two_of(~ad, ~bd, ~cd)
    return torch.stack(kept, -1).flatten(-2)


def _two_of(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Where at least two are true."""
    return (a & b) | (c & (a | b))


@cache
def patterns(device: torch.device | None = None) -> Tensor:
    """All 4×4 tiles with two ones in every row and column; bool (90, 4, 4), where the index is the tile's code."""
    rows = [tuple(column in pair for column in range(4)) for pair in combinations(range(4), 2)]
    tiles = torch.tensor(list(product(rows, repeat=4)), device=device)
    return tiles[(tiles.sum(1) == 2).all(1)]


def tile_codes(weight: Tensor, *, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    """The code of the transposable mask that keeps most, for each 4×4 tile; of equal ones, the lowest.

    Args:
        weight: (rows, columns).
        norm: what is kept most of: the sum of magnitudes, or of squares.

    Returns:
        uint8 (rows / 4, columns / 4).

    Raises:
        ConfigError: rows or columns are not a multiple of four.
    """
    tiles = _tiles(weight)
    if kernels.usable(weight):
        return kernels.tile_codes(weight, patterns(weight.device), squares=norm == "l2")
    bank = patterns(weight.device).flatten(1).to(tiles.dtype)
    codes = torch.arange(len(bank), device=weight.device)[:, None]
    # Entries first, so that one product of matrices scores a block and its maxima are taken of whole vectors.
    entries = (tiles.square() if norm == "l2" else tiles.abs()).flatten(0, 1).flatten(1).t().contiguous()
    best = []
    for block in entries.split(BLOCK, dim=1):
        scores = bank @ block
        best.append(torch.where(scores == scores.amax(0), codes, len(bank) - 1).amin(0))
    return torch.cat(best).to(torch.uint8).view(tiles.shape[:2])


def mask_of(codes: Tensor) -> Tensor:
    """The mask of tiles' codes: uint8 (rows / 4, columns / 4) -> bool (rows, columns)."""
    # A row of a tile is four bytes: one word is looked up for four entries.
    words = _words(codes.device)[codes.int()]
    return words.transpose(1, 2).flatten().view(torch.bool).view(4 * codes.shape[0], 4 * codes.shape[1])


@cache
def _words(device: torch.device) -> Tensor:
    return patterns(device).contiguous().view(torch.int32).squeeze(-1)


def transposable_mask(weight: Tensor, *, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    """The transposable mask that keeps most of a weight; see `tile_codes`."""
    return mask_of(tile_codes(weight, norm=norm))


def greedy_mask(weight: Tensor) -> Tensor:
    """A transposable mask as torch's `largest_abs_values_greedy` makes it: the largest magnitude first.

    An entry is kept where its row and its column of the tile have room left. One tile in six ends with fewer than
    eight entries.
    """
    return _greedy(weight, weight.abs())


def torch_default_mask(weight: Tensor) -> Tensor:
    """What torch's semi-structured pruning does where no algorithm is named: greedy by signed value.

    A baseline, never to be trained with: large negative weights are dropped first. Of Gaussian weights it keeps 0.57
    of the sum of squares, where magnitudes keep 0.82.
    """
    return _greedy(weight, weight)


def _greedy(weight: Tensor, order: Tensor) -> Tensor:
    tiles = _tiles(order.detach()).flatten(0, 1).flatten(1)
    kept = torch.zeros_like(tiles, dtype=torch.bool)
    room = torch.full((2, len(tiles), 4), 2, device=weight.device)  # in each row and column
    for place in tiles.argsort(dim=1, descending=True, stable=True).unbind(1):
        row, column = (place // 4)[:, None], (place % 4)[:, None]
        fits = (room[0].gather(1, row) > 0) & (room[1].gather(1, column) > 0)
        kept.scatter_(1, place[:, None], fits)
        room[0].scatter_add_(1, row, -fits.long())
        room[1].scatter_add_(1, column, -fits.long())
    rows, columns = weight.shape
    return kept.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def _tiles(weight: Tensor) -> Tensor:
    """(rows, columns) -> (rows / 4, columns / 4, 4, 4), in a type that CPUs multiply."""
    if weight.dim() != 2:
        raise ConfigError(f"a tensor of {weight.dim()} dimensions has no 4×4 tiles", hint="give a matrix")
    _require_multiple_of_four(weight, columns=False)
    rows, columns = weight.shape
    tiles = weight.detach().reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2)
    return tiles if tiles.dtype == torch.float64 else tiles.float()


def _require_multiple_of_four(weight: Tensor, *, columns: bool) -> None:
    sizes = weight.shape[-1:] if columns else weight.shape
    if any(size % 4 for size in sizes):
        shape = " x ".join(map(str, weight.shape))
        raise ConfigError(f"a weight of {shape} does not divide into groups of four", hint="leave this layer dense")


def prune(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight with zeros where the mask is false.

    Raises:
        ConfigError: the mask is not of bool: of integers, `~mask` would be -1 and -2.
    """
    return weight.masked_fill(~require_bool(mask), 0)


def require_bool(mask: Tensor) -> Tensor:
    """The mask, if it is one of bool."""
    if mask.dtype != torch.bool:
        raise ConfigError(f"a mask of {mask.dtype} inverts to other numbers than 0 and 1", hint="give a mask of bool")
    return mask


def require_2_4(weight: Tensor) -> Tensor:
    """The weight, if no group of four consecutive entries of a row has more than two that are not zero.

    Raises:
        ConfigError: it is not 2:4. torch packs such a weight nevertheless, into garbage (pytorch issue 159872).
    """
    _require_multiple_of_four(weight, columns=True)
    crowded = (weight.unflatten(-1, (-1, 4)) != 0).sum(-1) > 2
    if crowded.any():
        raise ConfigError(
            f"{int(crowded.sum())} of {crowded.numel()} groups of four weights have more than two that are not zero",
            hint="prune it first, by `row_mask` for example",
        )
    return weight


def flip_rate(before: Tensor, after: Tensor) -> Tensor:
    """The fraction of a mask's entries that changed (Hu et al., 2024); 0-d."""
    return (require_bool(before) ^ require_bool(after)).float().mean()


def kept_energy(weight: Tensor, mask: Tensor) -> Tensor:
    """The share of a weight's sum of squares that its mask keeps; 0-d."""
    squares = weight.detach().double().square()
    return (squares * require_bool(mask)).sum() / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
