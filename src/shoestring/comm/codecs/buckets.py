"""Treats gradients as rows of buckets, and reads and writes them in ranges that fit the cache, without copying all of
them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_

BLOCK = 2**17  # number of entries processed at once; they and their results fit the cache


@dataclass(frozen=True)
class BucketRange:
    """Consecutive buckets, and the tensor entries that they contain."""

    start: int
    stop: int
    bucket: int
    pieces: tuple[tuple[int, slice, slice], ...]
    """One tuple for each tensor with entries in the range: (index of the tensor, slice of the tensor's entries, slice
    of the range)."""

    def take(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Views of the flat tensors' entries in this range, one for each of `pieces`."""
        return [flats[index][entries] for index, entries, _ in self.pieces]

    def within(self, x: Tensor) -> list[Tensor]:
        """Views of x (buckets, bucket) at the positions of those entries, one for each of `pieces`."""
        flat = x.view(-1)
        return [flat[where] for _, _, where in self.pieces]

    def read(self, summands: Sequence[Sequence[Tensor]]) -> Tensor:
        """Read the sum of several lists of flat tensors in this range: (buckets, bucket) in fp32; padding is zero."""
        first, *others = summands
        x = torch.zeros(self.stop - self.start, self.bucket, device=first[0].device)
        if self.pieces:
            foreach_copy_(self.within(x), self.take(first))
            for flats in others:
                foreach_add_(self.within(x), self.take(flats))
        return x

    def write(self, x: Tensor, flats: Sequence[Tensor]) -> None:
        """Write x (buckets, bucket) into this range of a list of flat tensors."""
        if self.pieces:
            foreach_copy_(self.take(flats), self.within(x))


class BucketLayout:
    """Maps flat tensors to positions in (rows, buckets, bucket). Each tensor starts a new bucket, and its last bucket
    is padded with zeros.

    No bucket holds entries of two tensors. The last row may end with unused buckets.
    """

    def __init__(self, flats: Sequence[Tensor], rows: int, bucket: int) -> None:
        self.sizes, self.device = [len(flat) for flat in flats], flats[0].device
        self.rows, self.bucket = rows, bucket
        self.starts = list(accumulate((-(-size // bucket) for size in self.sizes), initial=0))
        self.buckets = -(-self.starts[-1] // rows)

    def step(self, beside: int = 1) -> int:
        """Number of buckets to process at once if `beside` tensors of this size share the cache; a multiple of 4."""
        block = BLOCK if self.device.type == "cpu" else self.rows * self.buckets * self.bucket
        return max(block // (4 * self.bucket * beside), 1) * 4

    def parts(self, step: int, first: int = 0, end: int | None = None) -> list[BucketRange]:
        """Ranges of at most `step` buckets that cover the rows from `first` up to, but excluding, `end`; by default all
        rows."""
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
        """Number of entries in each bucket without padding, (rows x buckets, 1) in fp32; unused buckets count as
        full."""
        counts = torch.full((self.rows * self.buckets, 1), float(self.bucket))
        counts[[end - 1 for end in self.starts[1:]], 0] -= torch.tensor([float(-n % self.bucket) for n in self.sizes])
        return counts.to(self.device)


class LateBuckets:
    """Base class of buckets whose residuals change only in `decode`, so that a failed exchange leaves nothing to
    undo."""

    def remember(self, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""

    def give_up(self) -> None:
        """See `quantize.Buckets`."""
