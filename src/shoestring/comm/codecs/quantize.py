"""Quantisation in buckets, reduced by owners: 8 or 4 bits an entry both ways (CGX, Markov et al. 2022, after QSGD).

Every rank owns an equal part of the entries. Each sends each owner its part, compressed; the owner averages in fp32,
compresses the average again, and sends it to all. An owner's own part never travels before the average, so it enters
that exactly; the residual it therefore does not need there holds what the second compression leaves. So one residual
serves both compressions, and its mean over the ranks is exactly what the model is still owed.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs.bits import pack, unpack
from shoestring.comm.codecs.buckets import BLOCK, BucketLayout, BucketRange
from shoestring.comm.codecs.codec import AllGather, AllToAll, Codec, Coding, ExchangeContext, Grads


class ReduceScatterCodec(Codec):
    """Scatter-reduce and all-gather with a compression before each.

    The work is done in blocks that stay in the cache. State: "residual", where there is error feedback.

    Args:
        bits: of an entry on the wire.
        bucket: entries that share a scale; a bucket never crosses parameters, whose gradients differ in size.
        feedback: add to each gradient what the exchanges before left out of it.
        seed: of the noise, for compressions that draw.
    """

    stages = 2
    offset: int
    """Of codes: a level is (code << shift) - offset. Codes of 8 bits are signed."""
    shift: int = 0

    def __init__(self, bits: int, *, bucket: int, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.bits, self.bucket, self.feedback, self.seed = bits, bucket, feedback, seed

    @abstractmethod
    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """Levels in fp32, as x (buckets, bucket), and scales (buckets, 1), whose product is about x.

        Levels are whole numbers; a scale is non-finite where x is.

        Args:
            entries: (buckets, 1), how many of each bucket's entries are no padding; fp32.
        """

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        noise, flats = make_generator(self.seed, context, grads), [grad.view(-1) for grad in grads.values()]
        owed = [each.view(-1) for each in self.get_states("residual", grads)] if self.feedback else []
        summands = [flats, owed] if self.feedback else [flats]
        # What compression leaves waits where the gradients were, until the last answers are there.
        left = [flat if flat.dtype == torch.float32 else flat.float() for flat in flats] if self.feedback else []
        layout, row = BucketLayout(flats, context.size, self.bucket), context.rank
        entries, step = layout.entries(), layout.step()
        levels = torch.zeros(len(entries), self.bucket, dtype=torch.int8, device=entries.device)
        scales = torch.empty_like(entries)
        for part in layout.parts(step, row, row + 1):  # does not travel, but is looked at like the others
            scales[part.start : part.stop] = part.read(summands).abs().amax(-1, keepdim=True)
        for part in [*layout.parts(step, 0, row), *layout.parts(step, row + 1)]:
            x = part.read(summands)
            self._compress(x, part.start, entries, (levels, scales), noise)
            if self.feedback:
                part.write(x, left)
        largest = scales.amax().expand(context.size, 1)  # tells every rank whether all entries are finite
        *theirs, _ = yield [AllToAll(each) for each in [*self._packed(levels, scales, context.size), largest]]

        mine = layout.parts(layout.step(beside=context.size), row, row + 1)
        own = slice(mine[0].start, mine[-1].stop)
        averages = list(self._averages(theirs, mine, summands, row))
        for part, average in zip(mine, averages, strict=True):
            self._compress(average, part.start, entries, (levels, scales), noise)
            if self.feedback:
                part.write(average.mul_(context.size), left)
        everywhere = yield [AllGather(each[0]) for each in self._packed(levels[own], scales[own], 1)]
        if self.feedback:
            foreach_copy_(owed, left)
        levels, scales = (each.flatten(0, 1) for each in self._opened(everywhere))
        for part in layout.parts(step):
            part.write(levels[part.start : part.stop] * scales[part.start : part.stop], flats)

    def _compress(
        self, x: Tensor, start: int, entries: Tensor, into: tuple[Tensor, Tensor], noise: torch.Generator
    ) -> None:
        """Put levels and scales of x (buckets, bucket) where its buckets begin; x becomes what they leave of it."""
        block = slice(start, start + len(x))
        levels, scale = self.encode(x, entries[block], noise)
        into[0][block], into[1][block] = levels, scale
        x.addcmul_(levels, scale, value=-1)

    def _packed(self, levels: Tensor, scales: Tensor, rows: int) -> list[Tensor]:
        """What travels: codes (rows, bytes), and scales (rows, buckets, 1)."""
        codes = levels.view(rows, -1)
        if self.bits < 8:
            codes = pack(((codes + self.offset) >> self.shift).view(torch.uint8), self.bits)
        return [codes, scales.view(rows, -1, 1)]

    def _opened(self, sent: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The inverse of `_packed`: levels (rows, buckets, bucket) in int8, and scales."""
        codes, scales = sent
        if self.bits < 8:
            codes = unpack(codes, self.bits, scales.shape[1] * self.bucket).view(torch.int8)
            codes = codes.bitwise_left_shift_(self.shift).sub_(self.offset)
        return codes.unflatten(1, (-1, self.bucket)), scales

    def _averages(
        self, theirs: Sequence[Tensor], mine: Sequence[BucketRange], summands: Sequence[Sequence[Tensor]], rank: int
    ) -> Iterator[Tensor]:
        """Of each part of this rank's row, the mean of what the others sent and of what it has itself, exactly."""
        levels, scales = self._opened(theirs)
        for part in mine:
            block = slice(part.start - mine[0].start, part.stop - mine[0].start)
            every = levels[:, block] * scales[:, block]
            every[rank] = part.read(summands)
            yield every.mean(0)


class QuantizeCodec(ReduceScatterCodec):
    """Integers of `bits` bits times a scale for each bucket, its largest magnitude.

    Symmetric rather than from the least to the largest entry, so that a zero stays exactly zero: Adam would make steps
    of full length of the noise in rows of an embedding that no token used.

    Args:
        rounding: "stochastic" is unbiased and needs no feedback; "nearest" errs less and does.
    """

    def __init__(
        self,
        bits: Literal[4, 8] = 8,
        *,
        bucket: int = 512,
        rounding: Literal["nearest", "stochastic"] = "stochastic",
        feedback: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(bits, bucket=bucket, feedback=feedback, seed=seed)
        self.rounding, self.top = rounding, 2 ** (bits - 1) - 1
        self.offset = self.top if bits < 8 else 0

    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).div_(self.top)
        q = x * scale.reciprocal().nan_to_num_(0, posinf=0)
        if self.rounding == "nearest":
            return q.round_(), scale
        add_noise_(q, noise)
        return q.round_().clamp_(-self.top, self.top), scale


def make_generator(seed: int, context: ExchangeContext, grads: Grads) -> torch.Generator:
    """Noise of its own for each rank, step, and set of gradients."""
    words = repr((seed, context.step, context.rank, *grads)).encode()
    number = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())
    return torch.Generator(next(iter(grads.values())).device).manual_seed(number)


def add_noise_(q: Tensor, noise: torch.Generator) -> None:
    """Add numbers that are uniform in (-½, ½): rounding to the nearest integer then is stochastic and unbiased.

    They have 16 bits, drawn four at a time: torch draws a 64-bit integer as fast as an fp32 number on the CPU.
    """
    for part in q.view(-1).split(BLOCK if q.device.type == "cpu" else max(q.numel(), 1)):
        drawn = torch.empty(-(-len(part) // 4), dtype=torch.int64, device=q.device)
        drawn.random_(-(2**63), None, generator=noise)
        part.add_(drawn.view(torch.int16)[: len(part)], alpha=2.0**-16).add_(2.0**-17)
