"""The kernels do what torch's operations do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

import torch

from shoestring.sparse import kernels, masks
from shoestring.sparse.mvue import draw_key, mvue


def drawn(rows: int, columns: int) -> torch.Tensor:
    """Weights of 8 bits of precision, so that many are equal, and sums exact in any order."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    return (values * 32).round() / 32


def check_masks(device: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = drawn(rows, columns).to(dtype)
    assert torch.equal(kernels.row_mask(weight.to(device)).cpu(), masks.row_mask(weight))
    for squares in (False, True):
        ours = kernels.tile_codes(weight.to(device), masks.patterns(torch.device(device)), squares=squares)
        assert torch.equal(ours.cpu(), masks.tile_codes(weight, norm="l2" if squares else "l1"))


def check_draws(device: str, rows: int, columns: int, first: int) -> None:
    x = drawn(rows, columns)
    key = draw_key(3, torch.tensor(11))
    ours = kernels.mvue(x.to(device), key.to(device), first).cpu()
    theirs = mvue(x, key, first=first)
    same = ours == theirs  # a division rounded otherwise may move an entry over the edge, once in a million
    assert same.float().mean() > 0.999
    assert torch.equal(ours[:, same.all(0)], theirs[:, same.all(0)])


def main(device: str) -> None:
    for rows, columns in ((4, 4), (4, 260), (64, 128), (132, 20)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_masks(device, rows, columns, dtype)
    for rows, columns in ((4, 1), (6, 7), (64, 128), (33, 130)):
        for first in (0, 5, 1 << 29):
            check_draws(device, rows, columns, first)


if __name__ == "__main__":
    main("cpu")
    print("as it must be")
