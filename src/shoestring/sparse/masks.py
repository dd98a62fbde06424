"""2:4 masks: two of every four consecutive weights of a row are kept, or two in each row and column of every 4×4 tile.

A mask is a bool tensor of the weight's shape, true where a weight is kept. Masks keep the largest magnitudes. Torch's
own pruning compares signed values by default; `torch_default_mask` does the same, as a baseline.

A transposable mask (Hubara et al., 2021) keeps two entries in every row and every column of each 4×4 tile. There are 90
transposable patterns, so the pattern of a tile is stored as a code of one byte.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import Literal

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.sparse import kernels

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 8192
"""Number of tiles scored at a time, chosen so that the scores, 90 per tile, fit in the processor's cache."""


def row_mask(scores: Tensor) -> Tensor:
    """Mask that keeps the two largest magnitudes of every four consecutive entries of a row; of equals, the first.

    NaN counts as larger than any number. Every group therefore keeps exactly two entries, and NaN is not hidden.

    Args:
        scores: (…, columns), weights or scores of weights.

    Raises:
        ConfigError: the columns are not a multiple of four.
    """
    _require_multiple_of_four(scores, columns=True)
    if kernels.usable(scores):
        return kernels.row_mask(scores)
    # Six comparisons order four entries; the first of equal entries wins. An entry that wins two of its three
    # comparisons is kept. Magnitudes are compared as integers of the same bits, which have the same order, with NaN as
    # the largest.
    magnitudes = scores.detach().abs()
    if magnitudes.is_floating_point():
        magnitudes = magnitudes.view(_INTEGERS[magnitudes.itemsize])
    a, b, c, d = magnitudes.unflatten(-1, (-1, 4)).movedim(-1, 0).contiguous()
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    mask = _two_of(ab, ac, ad), _two_of(~ab, bc, bd), _two_of(~ac, ~bc, cd), _two_of(~ad, ~bd, ~cd)
    return torch.stack(mask, -1).flatten(-2)


def _two_of(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Elementwise: whether at least two of the three are true."""
    return (a & b) | (c & (a | b))


@cache
def patterns(device: torch.device | None = None) -> Tensor:
    """All 4×4 patterns with two ones in every row and column, indexed by code; bool (90, 4, 4)."""
    rows = [tuple(column in pair for column in range(4)) for pair in combinations(range(4), 2)]
    tiles = torch.tensor(list(product(rows, repeat=4)), device=device)
    return tiles[(tiles.sum(1) == 2).all(1)]


def tile_codes(weight: Tensor, *, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    """The code of the best transposable mask of each 4×4 tile; among equally good masks, the lowest code.

    Args:
        weight: (rows, columns).
        norm: quantity that the best mask maximises: the sum of kept magnitudes (l1) or of kept squares (l2).

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
    # Tiles are columns, so that a matrix product scores a block, and the maximum over patterns is taken over rows.
    entries = (tiles.square() if norm == "l2" else tiles.abs()).flatten(0, 1).flatten(1).t().contiguous()
    best = []
    for block in entries.split(BLOCK, dim=1):
        scores = bank @ block
        best.append(torch.where(scores == scores.amax(0), codes, len(bank) - 1).amin(0))
    return torch.cat(best).to(torch.uint8).view(tiles.shape[:2])


def mask_of(codes: Tensor) -> Tensor:
    """Expand the codes of tiles to a mask: uint8 (rows / 4, columns / 4) -> bool (rows, columns)."""
    # A row of a tile is four bool bytes, which are looked up as one 32-bit word.
    words = _words(codes.device)[codes.int()]
    return words.transpose(1, 2).flatten().view(torch.bool).view(4 * codes.shape[0], 4 * codes.shape[1])


@cache
def _words(device: torch.device) -> Tensor:
    """The rows of all patterns as words of four bytes; int32 (90, 4)."""
    return patterns(device).contiguous().view(torch.int32).squeeze(-1)


def transposable_mask(weight: Tensor, *, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    """The best transposable mask of a weight; see `tile_codes`."""
    return mask_of(tile_codes(weight, norm=norm))


def greedy_mask(weight: Tensor) -> Tensor:
    """Transposable mask by torch's `largest_abs_values_greedy`.

    Entries are visited from the largest to the smallest magnitude. An entry is kept if its row and its column of the
    tile each hold fewer than two kept entries so far. One tile in six ends with fewer than eight kept entries.
    """
    return _greedy(weight, weight.abs())


def torch_default_mask(weight: Tensor) -> Tensor:
    """Greedy transposable mask by signed value, as torch's semi-structured pruning makes it by default.

    This mask is only a baseline: it drops large negative weights first. For Gaussian weights, it keeps 0.57 of the sum
    of squares; selection by magnitude keeps 0.82.
    """
    return _greedy(weight, weight)


def _greedy(weight: Tensor, order: Tensor) -> Tensor:
    """Greedy transposable mask that visits entries in descending order of the scores `order`, in all tiles at once."""
    tiles = _tiles(order.detach()).flatten(0, 1).flatten(1)
    mask = torch.zeros_like(tiles, dtype=torch.bool)
    room = torch.full((2, len(tiles), 4), 2, device=weight.device)  # number of entries a row or column may still keep
    for place in tiles.argsort(dim=1, descending=True, stable=True).unbind(1):
        row, column = (place // 4)[:, None], (place % 4)[:, None]
        fits = (room[0].gather(1, row) > 0) & (room[1].gather(1, column) > 0)
        mask.scatter_(1, place[:, None], fits)
        room[0].scatter_add_(1, row, -fits.long())
        room[1].scatter_add_(1, column, -fits.long())
    rows, columns = weight.shape
    return mask.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def _tiles(weight: Tensor) -> Tensor:
    """Cut a matrix into 4×4 tiles: (rows, columns) -> (rows / 4, columns / 4, 4, 4), in fp32 or fp64."""
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
        ConfigError: the mask's type is not bool. For an integer mask, `~mask` would be -1 and -2.
    """
    return weight.masked_fill(~require_bool(mask), 0)


def require_bool(mask: Tensor) -> Tensor:
    """Return the mask; raise ConfigError if its type is not bool."""
    if mask.dtype != torch.bool:
        raise ConfigError(f"inverting a mask of {mask.dtype} gives values other than 0 and 1", hint="give a bool mask")
    return mask


def require_2_4(weight: Tensor) -> Tensor:
    """Return the weight if it is 2:4: at most two of every four consecutive entries of a row are not zero.

    Raises:
        ConfigError: the weight is not 2:4. Torch would pack such a weight to wrong values without an error (pytorch
            issue 159872).
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
    """The fraction of a weight's sum of squares that its mask keeps; 0-d."""
    squares = weight.detach().double().square()
    return (squares * require_bool(mask)).sum() / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
