"""Gradients as rows of buckets, without a copy of them: they are read and written in parts that stay in the cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_

BLOCK = 2**17  # entries that are worked on at once: with as many of what comes of them, they stay in the cache


@dataclass(frozen=True)
class BucketRange:
    """Some buckets that follow each other, and what of the tensors lies in them."""

    start: int
    stop: int
    bucket: int
    pieces: tuple[tuple[int, slice, slice], ...]
    """Which tensor, its entries, and where they are in the part."""

    def of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The entries of flat tensors that are in this part."""
        return [flats[index][entries] for index, entries, _ in self.pieces]

    def within(self, x: Tensor) -> list[Tensor]:
        """Where those are in x (buckets, bucket)."""
        flat = x.view(-1)
        return [flat[where] for _, _, where in self.pieces]

    def read(self, summands: Sequence[Sequence[Tensor]]) -> Tensor:
        """This part (buckets, bucket) of the sum of several sets of the flat tensors, in fp32; zero where none is."""
        first, *others = summands
        x = torch.zeros(self.stop - self.start, self.bucket, device=first[0].device)
        if self.pieces:
            foreach_copy_(self.within(x), self.of(first))
            for each in others:
                foreach_add_(self.within(x), self.of(each))
        return x

    def write(self, x: Tensor, flats: Sequence[Tensor]) -> None:
        """Put x (buckets, bucket) into a set of the flat tensors."""
        if self.pieces:
            foreach_copy_(self.of(flats), self.within(x))


class BucketLayout:
    """How flat tensors lie in (rows, buckets, bucket): each from the start of a bucket, and zeros after it.

    So a bucket never crosses tensors. The last row may end in buckets that belong to nobody.
    """

    def __init__(self, flats: Sequence[Tensor], rows: int, bucket: int) -> None:
        self.sizes, self.device = [len(flat) for flat in flats], flats[0].device
        self.rows, self.bucket = rows, bucket
        self.starts = list(accumulate((-(-size // bucket) for size in self.sizes), initial=0))
        self.buckets = -(-self.starts[-1] // rows)

    def step(self, beside: int = 1) -> int:
        """How many buckets to work on at once, of as many tensors side by side: a multiple of 4."""
        block = BLOCK if self.device.type == "cpu" else self.rows * self.buckets * self.bucket
        return max(block // (4 * self.bucket * beside), 1) * 4

    def parts(self, step: int, first: int = 0, end: int | None = None) -> list[BucketRange]:
        """All buckets of rows `first` to `end` (beyond; the last one if not said), at most `step` at a time."""
        last = (self.rows if end is None else end) * self.buckets
        starts = range(first * self.buckets, last, step)
        return [self._part(start, min(start + step, last)) for start in starts]

    def _part(self, start: int, stop: int) -> BucketRange:
        pieces, first = [], bisect_right(self.starts, start) - 1
        for index in range(first, min(bisect_left(self.starts, stop), len(self.sizes))):
            begin = max(start - self.starts[index], 0) * self.bucket
            end = min((stop - self.starts[index]) * self.bucket, self.sizes[index])
            ahead = (self.starts[index] - start) * self.bucket
            pieces.append((index, slice(begin, end), slice(ahead + begin, ahead + end)))
        return BucketRange(start, stop, self.bucket, tuple(pieces))

    def entries(self) -> Tensor:
        """(rows x buckets, 1) how many entries of each bucket are no padding; those of nobody count as full; fp32."""
        counts = torch.full((self.rows * self.buckets, 1), float(self.bucket))
        counts[[end - 1 for end in self.starts[1:]], 0] -= torch.tensor([float(-n % self.bucket) for n in self.sizes])
        return counts.to(self.device)
