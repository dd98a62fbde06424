"""Quantisation in buckets by a compressed reduce-scatter and all-gather (CGX, Markov et al. 2022, after QSGD).

Every rank owns an equal shard of the entries. Ranks send each owner its shard, compressed. The owner averages in fp32,
compresses the average again, and sends it to all. An owner's own entries enter the average exactly, because they do not
travel before it. So its residual there is free for the error of the second compression. One residual thus serves both
compressions, and its mean over the ranks is exactly the part of the gradients that was not applied yet.
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
    """Reduce-scatter and all-gather, each with compressed messages.

    The work is done in blocks that fit the cache. State: "residual", where there is error feedback.

    Args:
        bits: bits of an entry on the wire.
        bucket: entries that share a scale, all of one parameter, because the sizes of gradients differ.
        feedback: add the compression errors of earlier exchanges to each gradient.
        seed: seed of the noise, for stochastic compression.
    """

    stages = 2
    offset: int
    """A level is (code << shift) - offset. Codes of 8 bits are signed."""
    shift: int = 0

    def __init__(self, bits: int, *, bucket: int, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.bits, self.bucket, self.feedback, self.seed = bits, bucket, feedback, seed

    @abstractmethod
    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """Encode x (buckets, bucket) as fp32 levels of the same shape and scales (buckets, 1): x ≈ levels * scales.

        Levels are whole numbers; a scale is non-finite where x is.

        Args:
            entries: number of entries of each bucket that are not padding, (buckets, 1) in fp32.
        """

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        noise, flats = make_generator(self.seed, context, grads), [grad.view(-1) for grad in grads.values()]
        residuals = [state.view(-1) for state in self.get_states("residual", grads)] if self.feedback else []
        summands = [flats, residuals] if self.feedback else [flats]
        # Compression errors are stored in place of the gradients until the last answers have arrived.
        errors = [flat if flat.dtype == torch.float32 else flat.float() for flat in flats] if self.feedback else []
        layout, row = BucketLayout(flats, context.size, self.bucket), context.rank
        entries, step = layout.entries(), layout.step()
        levels = torch.zeros(len(entries), self.bucket, dtype=torch.int8, device=entries.device)
        scales = torch.empty_like(entries)
        for part in layout.parts(step, row, row + 1):  # its own row does not travel, but non-finite entries must show
            scales[part.start : part.stop] = part.read(summands).abs().amax(-1, keepdim=True)
        for part in [*layout.parts(step, 0, row), *layout.parts(step, row + 1)]:
            x = part.read(summands)
            self._compress(x, part.start, entries, (levels, scales), noise)
            if self.feedback:
                part.write(x, errors)
        largest = scales.amax().expand(context.size, 1)  # shows every rank whether all entries are finite
        *theirs, _ = yield [AllToAll(tensor) for tensor in [*self._pack(levels, scales, context.size), largest]]

        mine = layout.parts(layout.step(beside=context.size), row, row + 1)
        own = slice(mine[0].start, mine[-1].stop)
        averages = list(self._average(theirs, mine, summands, row))
        for part, average in zip(mine, averages, strict=True):
            self._compress(average, part.start, entries, (levels, scales), noise)
            if self.feedback:
                part.write(average.mul_(context.size), errors)
        everywhere = yield [AllGather(rows[0]) for rows in self._pack(levels[own], scales[own], 1)]
        if self.feedback:
            foreach_copy_(residuals, errors)
        levels, scales = (tensor.flatten(0, 1) for tensor in self._unpack(everywhere))
        for part in layout.parts(step):
            part.write(levels[part.start : part.stop] * scales[part.start : part.stop], flats)

    def _compress(
        self, x: Tensor, start: int, entries: Tensor, into: tuple[Tensor, Tensor], noise: torch.Generator
    ) -> None:
        """Store levels and scales of x (buckets, bucket) from bucket `start` on; x becomes the compression error."""
        block = slice(start, start + len(x))
        levels, scale = self.encode(x, entries[block], noise)
        into[0][block], into[1][block] = levels, scale
        x.addcmul_(levels, scale, value=-1)

    def _pack(self, levels: Tensor, scales: Tensor, rows: int) -> list[Tensor]:
        """Pack levels and scales as they travel: codes (rows, bytes), and scales (rows, buckets, 1)."""
        codes = levels.view(rows, -1)
        if self.bits < 8:
            codes = pack(((codes + self.offset) >> self.shift).view(torch.uint8), self.bits)
        return [codes, scales.view(rows, -1, 1)]

    def _unpack(self, sent: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The inverse of `_pack`: levels (rows, buckets, bucket) in int8, and scales."""
        codes, scales = sent
        if self.bits < 8:
            codes = unpack(codes, self.bits, scales.shape[1] * self.bucket).view(torch.int8)
            codes = codes.bitwise_left_shift_(self.shift).sub_(self.offset)
        return codes.unflatten(1, (-1, self.bucket)), scales

    def _average(
        self, theirs: Sequence[Tensor], mine: Sequence[BucketRange], summands: Sequence[Sequence[Tensor]], rank: int
    ) -> Iterator[Tensor]:
        """The mean of each range of this rank's row: of the others' messages, and of its own exact entries."""
        levels, scales = self._unpack(theirs)
        for part in mine:
            block = slice(part.start - mine[0].start, part.stop - mine[0].start)
            ranks = levels[:, block] * scales[:, block]
            ranks[rank] = part.read(summands)
            yield ranks.mean(0)


class QuantizeCodec(ReduceScatterCodec):
    """Integers of `bits` bits times a scale a bucket, which follows from its largest magnitude.

    The levels are symmetric about zero, so that a zero stays exactly zero. Otherwise Adam would turn the noise in the
    rows of an embedding that no token used into steps of full length.

    Args:
        rounding: "stochastic" is unbiased and needs no feedback; "nearest" has a smaller error, and needs it.
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
    """Make a generator whose noise differs between ranks, steps, and sets of gradients."""
    words = repr((seed, context.step, context.rank, *grads)).encode()
    number = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())
    return torch.Generator(next(iter(grads.values())).device).manual_seed(number)


def add_noise_(q: Tensor, noise: torch.Generator) -> None:
    """Add uniform noise in (-½, ½), which makes rounding to the nearest integer stochastic and unbiased.

    The noise has 16 bits. Four numbers are drawn at a time, because torch draws a 64-bit integer as fast as an fp32
    number on the CPU.
    """
    for part in q.view(-1).split(BLOCK if q.device.type == "cpu" else max(q.numel(), 1)):
        drawn = torch.empty(-(-len(part) // 4), dtype=torch.int64, device=q.device)
        drawn.random_(-(2**63), None, generator=noise)
        part.add_(drawn.view(torch.int16)[: len(part)], alpha=2.0**-16).add_(2.0**-17)
