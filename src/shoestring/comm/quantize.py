"""Quantisation in buckets, reduced by owners: 8 or 4 bits an entry both ways (CGX, Markov et al. 2022, after QSGD).

Every rank owns an equal part of the entries. Each sends each owner its part, compressed; the owner averages in fp32,
compresses the average again, and sends it to all. An owner's own part never travels before the average, so it enters
that exactly; the residual it therefore does not need there holds what the second compression leaves. So one residual
serves both compressions, and its mean over the ranks is exactly what the model is still owed.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from shoestring.comm.bits import pack, unpack
from shoestring.comm.codec import Codec, Coding, Gather, Grads, Swap, Turn
from shoestring.core._torch import foreach_add_, foreach_copy_


class OwnerReduced(Codec):
    """Scatter-reduce and all-gather with a compression before each.

    State: "residual", where there is error feedback.

    Args:
        bucket: entries that share a scale; a bucket never crosses parameters, whose gradients differ in size.
        feedback: add to each gradient what the exchanges before left out of it.
        seed: of the noise, for compressions that draw.
    """

    stages = 2

    def __init__(self, *, bucket: int, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.bucket, self.feedback, self.seed = bucket, feedback, seed

    @abstractmethod
    def compress(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> list[Tensor]:
        """Tensors (rows, ...) for x (rows, buckets, bucket); the last one is the scales, non-finite where x is.

        Args:
            entries: (rows, buckets, 1), how many of each bucket's entries are no padding; fp32.
        """

    @abstractmethod
    def expand(self, sent: Sequence[Tensor], out: Tensor) -> Tensor:
        """The inverse of `compress`, into `out`."""

    def code(self, grads: Grads, turn: Turn) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        tensors, noise = list(grads.values()), generator(self.seed, turn, grads)
        M, parts, entries = in_buckets(tensors, turn.size, self.bucket)
        foreach_copy_(parts, tensors)
        if self.feedback:
            foreach_add_(parts, self.keep("residual", grads))
        sent = self.compress(M, entries, noise)
        largest = sent[-1].abs().amax().expand(turn.size, 1)  # tells every rank whether all entries are finite
        *theirs, _ = yield [Swap(each) for each in [*sent, largest]]

        scratch = self.expand(theirs, torch.empty_like(M))
        own = slice(turn.rank, turn.rank + 1)
        scratch[own] = M[own]
        average = scratch.mean(0, keepdim=True)
        again = self.compress(average, entries[own], noise)
        if self.feedback:
            M -= self.expand(sent, scratch)
            M[own] = turn.size * (average - self.expand(again, scratch[own]))
            foreach_copy_(self.keep("residual", grads), parts)
        everywhere = yield [Gather(each[0]) for each in again]
        self.expand(everywhere, M)
        foreach_copy_(tensors, parts)


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
        super().__init__(bucket=bucket, feedback=feedback, seed=seed)
        self.bits, self.rounding, self.top = bits, rounding, 2 ** (bits - 1) - 1

    def compress(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> list[Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / self.top
        q = x * scale.reciprocal().nan_to_num_(0, posinf=0)
        if self.rounding == "stochastic":
            add_noise_(q, noise)
        levels = q.round_().clamp_(-self.top, self.top).to(torch.int8)
        return [levels if self.bits == 8 else pack((levels + self.top).to(torch.uint8).flatten(1), self.bits), scale]

    def expand(self, sent: Sequence[Tensor], out: Tensor) -> Tensor:
        levels, scale = sent
        if self.bits < 8:
            levels = unpack(levels, self.bits, out[0].numel()).view(torch.int8).view(out.shape) - self.top
        return torch.mul(levels, scale, out=out)


def in_buckets(tensors: Sequence[Tensor], rows: int, bucket: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Room for all tensors: zeros in fp32 (rows, buckets, bucket), its parts in their shapes, and entries a bucket."""
    counts = [-(-tensor.numel() // bucket) for tensor in tensors]
    starts = list(accumulate(counts, initial=0))
    buckets = -(-starts[-1] // rows)
    flat = torch.zeros(rows * buckets * bucket, device=tensors[0].device)
    parts = [flat[start * bucket :][: t.numel()].view(t.shape) for start, t in zip(starts, tensors, strict=False)]
    entries = torch.full((rows * buckets,), float(bucket))
    entries[[end - 1 for end in starts[1:]]] -= torch.tensor([float(-tensor.numel() % bucket) for tensor in tensors])
    return flat.view(rows, buckets, bucket), parts, entries.view(rows, buckets, 1).to(flat.device)


def generator(seed: int, turn: Turn, grads: Grads) -> torch.Generator:
    """Noise of its own for each rank, step, and set of gradients."""
    words = repr((seed, turn.step, turn.rank, *grads)).encode()
    number = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())
    return torch.Generator(next(iter(grads.values())).device).manual_seed(number)


def add_noise_(q: Tensor, noise: torch.Generator) -> None:
    """Add numbers that are uniform in (-½, ½): rounding to the nearest integer then is stochastic and unbiased.

    They have 16 bits, drawn four at a time: torch draws a 64-bit integer as fast as an fp32 number on the CPU.
    """
    drawn = torch.empty(-(-q.numel() // 4), dtype=torch.int64, device=q.device)
    drawn.random_(-(2**63), None, generator=noise)
    q.add_(drawn.view(torch.int16)[: q.numel()].view(q.shape), alpha=2.0**-16).add_(2.0**-17)
