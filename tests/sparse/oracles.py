"""What masks and draws must be, by enumeration, in double precision and in Python; and a check of an oracle's own."""

from __future__ import annotations

from itertools import combinations, product

import torch
from torch import Tensor

PAIRS = list(combinations(range(4), 2))


def best_row_energy(weight: Tensor) -> Tensor:
    """Per group of four, the largest sum of squares that two of them have."""
    squares = weight.double().square().reshape(-1, 4)
    return torch.stack([squares[:, list(pair)].sum(1) for pair in PAIRS]).amax(0)


def tiles(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return weight.double().reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 4, 4)


def best_tile_scores(scores: Tensor) -> Tensor:
    """Per 4×4 tile of scores (tiles, 4, 4), the largest sum of any of the 6^4 choices of two per row, of those that
    have two per column. Columns are counted, not looked up."""
    best = torch.full((len(scores),), -1.0, dtype=torch.float64)
    of_pair = torch.stack([scores[:, :, list(pair)].sum(-1) for pair in PAIRS])  # (6, tiles, 4 rows)
    for choice in product(range(6), repeat=4):
        columns = [0] * 4
        for pair in choice:
            for column in PAIRS[pair]:
                columns[column] += 1
        if columns == [2, 2, 2, 2]:
            best = torch.maximum(best, sum(of_pair[pair, :, row] for row, pair in enumerate(choice)))
    return best


def greedy_tile(order: list[list[float]]) -> list[list[bool]]:
    """Of one 4×4 tile, entry by entry from the largest on, those whose row and column have room."""
    kept = [[False] * 4 for _ in range(4)]
    for row, column in sorted(product(range(4), repeat=2), key=lambda at: -order[at[0]][at[1]]):
        if sum(kept[row]) < 2 and sum(kept[other][column] for other in range(4)) < 2:
            kept[row][column] = True
    return kept
