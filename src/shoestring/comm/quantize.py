"""Quantisation in buckets, reduced by owners: 8 or 4 bits an entry both ways (CGX, Markov et al. 2022, after QSGD).

Every rank owns an equal part of the entries. Each sends each owner its part, compressed; the owner averages in fp32,
compresses the average again, and sends it to all. An owner's own part never travels before the average, so it enters
that exactly; the residual it therefore does not need there holds what the second compression leaves. So one residual
serves both compressions, and its mean over the ranks is exactly what the model is still owed.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from shoestring.comm.bits import pack, unpack
from shoestring.comm.buckets import BLOCK, Layout, Part
from shoestring.comm.codec import Codec, Coding, Gather, Grads, Swap, Turn


class OwnerReduced(Codec):
    """Scatter-reduce and all-gather with a compression before each.

    The work is done in blocks that stay in the cache. State: "residual", where there is error feedback.

    Args:
        bits: of an entry on the wire.
        bucket: entries that share a scale; a bucket never crosses parameters, whose gradients differ in size.
        feedback: add to each gradient what the exchanges before left out of it.
        seed: of the noise, for compressions that draw.
    """

    stages = 2

    def __init__(self, bits: int, *, bucket: int, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.bits, self.bucket, self.feedback, self.seed = bits, bucket, feedback, seed

    @abstractmethod
    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes in fp32, as x (buckets, bucket), and scales (buckets, 1), non-finite where x is.

        Codes are whole numbers from 0 to 2^bits - 1; those of 8 bits are from -128 to 127.

        Args:
            entries: (buckets, 1), how many of each bucket's entries are no padding; fp32.
        """

    @abstractmethod
    def centre_(self, codes: Tensor) -> Tensor:
        """Codes of fewer than 8 bits as what to multiply the scale by; int8, in place."""

    def code(self, grads: Grads, turn: Turn) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        noise, flats = generator(self.seed, turn, grads), [grad.view(-1) for grad in grads.values()]
        owed = [each.view(-1) for each in self.keep("residual", grads)] if self.feedback else []
        summands = [flats, owed] if self.feedback else [flats]
        layout = Layout(flats, turn.size, self.bucket)
        parts, entries = layout.parts(layout.step()), layout.entries()
        sent = self.compress((part.read(summands) for part in parts), entries, turn.size, noise)
        largest = sent[-1].abs().amax().expand(turn.size, 1)  # tells every rank whether all entries are finite
        *theirs, _ = yield [Swap(each) for each in [*sent, largest]]

        mine = layout.parts(layout.step(beside=turn.size), turn.rank)
        averages = list(self.averages(theirs, mine, summands, turn.rank))
        again = self.compress(averages, entries[mine[0].start : mine[-1].stop], 1, noise)
        if self.feedback:
            for part, x in zip(parts, self.expanded(sent, parts), strict=True):
                part.write(part.read(summands).sub_(x), owed)
            for part, average, x in zip(mine, averages, self.expanded(again, mine), strict=True):
                part.write(average.sub_(x).mul_(turn.size), owed)
        everywhere = yield [Gather(each[0]) for each in again]
        for part, x in zip(parts, self.expanded(everywhere, parts), strict=True):
            part.write(x, flats)

    def compress(self, blocks: Iterable[Tensor], entries: Tensor, rows: int, noise: torch.Generator) -> list[Tensor]:
        """What travels of blocks of x (rows, buckets, bucket): codes (rows, bytes), and scales (rows, buckets, 1)."""
        codes = torch.empty(len(entries), self.bucket, dtype=torch.int8, device=entries.device)
        scales, start = torch.empty_like(entries), 0
        for x in blocks:
            block = slice(start, start + len(x))
            code, scale = self.encode(x, entries[block], noise)
            codes[block], scales[block] = code, scale
            start += len(x)
        flat = codes.view(rows, -1)
        return [flat if self.bits == 8 else pack(flat.view(torch.uint8), self.bits), scales.view(rows, -1, 1)]

    def opened(self, sent: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The inverse of `compress`: levels (rows, buckets, bucket) in int8 and scales, whose product is x."""
        codes, scales = sent
        if self.bits < 8:
            codes = self.centre_(unpack(codes, self.bits, scales.shape[1] * self.bucket).view(torch.int8))
        return codes.unflatten(1, (-1, self.bucket)), scales

    def averages(
        self, theirs: Sequence[Tensor], mine: Sequence[Part], summands: Sequence[Sequence[Tensor]], rank: int
    ) -> Iterator[Tensor]:
        """Of each part of this rank's row, the mean of what the others sent and of what it has itself, exactly."""
        levels, scales = self.opened(theirs)
        for part in mine:
            block = slice(part.start - mine[0].start, part.stop - mine[0].start)
            every = levels[:, block] * scales[:, block]
            every[rank] = part.read(summands)
            yield every.mean(0)

    def expanded(self, sent: Sequence[Tensor], parts: Sequence[Part]) -> Iterator[Tensor]:
        """x (buckets, bucket) of each part; they are what was compressed, or a row of it that was compressed alone."""
        levels, scales = (each.flatten(0, 1) for each in self.opened(sent))
        for part in parts:
            block = slice(part.start - parts[0].start, part.stop - parts[0].start)
            yield levels[block] * scales[block]


class Quantize(OwnerReduced):
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

    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).div_(self.top)
        q = x * scale.reciprocal().nan_to_num_(0, posinf=0)
        if self.rounding == "stochastic":
            add_noise_(q, noise)
        q.round_().clamp_(-self.top, self.top)
        return q if self.bits == 8 else q.add_(self.top), scale

    def centre_(self, codes: Tensor) -> Tensor:
        return codes.sub_(self.top)


def generator(seed: int, turn: Turn, grads: Grads) -> torch.Generator:
    """Noise of its own for each rank, step, and set of gradients."""
    words = repr((seed, turn.step, turn.rank, *grads)).encode()
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
