"""Quantises gradients in buckets, for a compressed reduce-scatter and all-gather (CGX, Markov et al., 2022, after
QSGD).

Every rank owns an equal shard of the entries. Every rank compresses all shards and sends them to their owners. The
owner averages in fp32, compresses the average, and sends it to all ranks. An owner's own entries are not sent, and so
enter the average uncompressed. The owner's residual in its own shard can therefore hold the error of the second
compression. One residual per rank thus serves both compressions, and its mean over ranks is exactly the part of the
gradients that was not applied yet.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs import fused, kernel_buckets
from shoestring.comm.codecs.bits import pack, packed_bytes, unpack
from shoestring.comm.codecs.buckets import BLOCK, BucketLayout, BucketRange, LateBuckets
from shoestring.comm.codecs.codec import AllGather, AllToAll, Codec, Coding, ExchangeContext, Grads
from shoestring.comm.codecs.native_buckets import LARGEST, NativeBuckets, kernels
from shoestring.comm.codecs.verdict import ALWAYS, ExchangeVerdict


class ReduceScatterCodec(Codec):
    """Averages gradients by a reduce-scatter and an all-gather, both with compressed messages.

    Entries are processed in blocks that fit the cache. State: "residual", if there is error feedback.

    Args:
        bits: bits per entry on the wire.
        bucket: number of entries that share a scale. A bucket has entries of one parameter only, because gradients of
            different parameters differ in scale.
        feedback: whether to add the compression errors of earlier exchanges to each gradient.
        seed: seed of the noise for stochastic rounding.
    """

    stages = 2
    offset: int
    """A level is (code << shift) - offset. Codes of 8 bits are signed."""
    shift: int = 0
    top: int
    """The largest level; 0 if levels are signs, with mean magnitudes as scales."""
    stochastic: bool = False
    compiled: bool = False
    """Whether the C functions of `native_buckets` support these levels."""

    def __init__(self, bits: int, *, bucket: int, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.bits, self.bucket, self.feedback, self.seed = bits, bucket, feedback, seed

    @abstractmethod
    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """Encode x (buckets, bucket) as fp32 levels (buckets, bucket) and scales (buckets, 1): x ≈ levels * scales.

        Levels are whole numbers; the scale of a bucket with a non-finite entry is non-finite.

        Args:
            entries: number of entries of each bucket that are not padding, (buckets, 1) in fp32.
        """

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        noise, flats = make_generator(self.seed, context, grads), [grad.view(-1) for grad in grads.values()]
        residuals = [state.view(-1) for state in self.get_states("residual", grads)] if self.feedback else []
        layout, rank = BucketLayout(flats, context.size, self.bucket), context.rank
        buckets = self.buckets(layout, flats, residuals, noise, context.verdict)
        size, width = (context.size, layout.buckets), packed_bytes(self.bucket, self.bits)
        codes = torch.zeros(*size, width, dtype=torch.uint8, device=layout.device)
        scales = torch.empty(*size, 1, device=layout.device)
        buckets.measure(rank, scales[rank])  # this row is not sent, but its non-finite entries must be detected
        for rows in (slice(0, rank), slice(rank + 1, context.size)):
            buckets.encode(rows, codes[rows].flatten(0, 1), scales[rows].flatten(0, 1))
        largest = scales.amax().repeat(context.size, 1)  # tells every rank whether all entries are finite
        buckets.remember(codes, scales)
        try:
            sent, sent_scales, _ = yield [AllToAll(tensor) for tensor in (codes, scales, largest)]
            buckets.encode_average(rank, sent, sent_scales, codes[rank], scales[rank])
            everywhere = yield [AllGather(tensor) for tensor in (codes[rank], scales[rank])]
        except GeneratorExit:  # raised if a result is not finite, or too large to decode
            buckets.give_up()
            raise
        buckets.decode(*everywhere)

    @property
    def replays(self) -> bool:
        return not self.feedback

    def decode_average(self, grads: Grads, answers: Sequence[Tensor], context: ExchangeContext) -> None:
        """See `Codec`."""
        flats = [grad.view(-1) for grad in grads.values() if grad.numel()]
        if flats:
            layout = BucketLayout(flats, context.size, self.bucket)
            self.buckets(layout, flats, [], torch.Generator(layout.device)).decode(*answers)

    def guards(self, grads: Grads) -> bool:
        """See `Codec`."""
        return kernel_buckets.take(grads.values(), self.bucket)

    def buckets(
        self,
        layout: BucketLayout,
        flats: list[Tensor],
        residuals: list[Tensor],
        noise: torch.Generator,
        verdict: ExchangeVerdict = ALWAYS,
    ) -> Buckets:
        """Choose the implementation for these tensors: C loops, Triton kernels, or torch's operations."""
        fits = self.compiled and layout.device.type == "cpu" and all(flat.dtype == torch.float32 for flat in flats)
        if fits and self.bucket <= LARGEST and kernels() is not None and not fused.is_available(layout.device):
            return NativeBuckets(layout, flats, residuals, self.bits, noise if self.stochastic else None)
        if kernel_buckets.take(flats, self.bucket):
            seed = noise.initial_seed() if self.stochastic else None
            return kernel_buckets.KernelBuckets(self, layout, flats, residuals, seed, verdict)
        return TorchBuckets(self, layout, flats, residuals, noise)

    def pack(self, levels: Tensor) -> Tensor:
        """Pack levels (buckets, bucket) into codes (buckets, bytes) for the wire."""
        if self.bits == 8:
            return levels.to(torch.int8).view(torch.uint8)
        return pack((levels.to(torch.int8) + self.offset >> self.shift).view(torch.uint8), self.bits)

    def unpack(self, codes: Tensor) -> Tensor:
        """The inverse of `pack`, in int8, for codes of any shape (…, bytes)."""
        if self.bits == 8:
            return codes.view(torch.int8)
        levels = unpack(codes.reshape(-1, codes.shape[-1]), self.bits, self.bucket).view(torch.int8)
        return levels.bitwise_left_shift_(self.shift).sub_(self.offset).view(*codes.shape[:-1], self.bucket)


class Buckets(Protocol):
    """Encodes the entries of one exchange as codes and scales of buckets, and decodes them.

    Residuals, if any, are added to the entries. Once the exchange has succeeded, the compression errors become the new
    residuals. An exchange may fail before `decode`.
    """

    def remember(self, codes: Tensor, scales: Tensor) -> None:
        """Store the codes (rows, buckets, bytes) and scales that are sent, until the exchange ends."""

    def measure(self, row: int, scales: Tensor) -> None:
        """Write the largest magnitude of each bucket of a row into scales (buckets, 1); a non-finite entry makes the
        magnitude non-finite."""

    def encode(self, rows: slice, codes: Tensor, scales: Tensor) -> None:
        """Encode rows into codes (buckets, bytes) and scales (buckets, 1)."""

    def encode_average(self, row: int, sent: Tensor, sent_scales: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Encode the mean of a row over ranks, from this rank's entries and the codes received from other ranks.

        Args:
            sent, sent_scales: received codes and scales (ranks, buckets, …).
        """

    def decode(self, codes: Tensor, scales: Tensor) -> None:
        """Replace the gradients by the decoded codes (rows, buckets, bytes) and scales; each row must be contiguous."""

    def give_up(self) -> None:
        """Restore the residuals as they were before the exchange, up to rounding."""


class TorchBuckets(LateBuckets):
    """`Buckets` implemented with torch's operations, in blocks that fit the cache."""

    def __init__(
        self,
        codec: ReduceScatterCodec,
        layout: BucketLayout,
        flats: list[Tensor],
        residuals: list[Tensor],
        noise: torch.Generator,
    ) -> None:
        self.codec, self.layout, self.flats, self.residuals, self.noise = codec, layout, flats, residuals, noise
        self.entries, self.step = layout.entries(), layout.step()
        self.summands = [flats, residuals] if residuals else [flats]
        self.errors = [flat if flat.dtype == torch.float32 else flat.float() for flat in flats] if residuals else []

    def measure(self, row: int, scales: Tensor) -> None:
        """See `Buckets`."""
        first = row * self.layout.buckets
        for part in self.layout.parts(self.step, row, row + 1):
            scales[part.start - first : part.stop - first] = part.read(self.summands).abs().amax(-1, keepdim=True)

    def encode(self, rows: slice, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        for part in self.layout.parts(self.step, rows.start, rows.stop):
            self._compress(part.read(self.summands), part, rows.start, 1, codes, scales)

    def encode_average(self, row: int, sent: Tensor, sent_scales: Tensor, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        ranks, first = self.layout.rows, row * self.layout.buckets
        for part in self.layout.parts(self.layout.step(beside=ranks), row, row + 1):
            block = slice(part.start - first, part.stop - first)
            decoded = self.codec.unpack(sent[:, block]) * sent_scales[:, block]
            decoded[row] = part.read(self.summands)
            average = decoded.mean(0)
            if not self.codec.top:  # padding decodes to a sign, not to zero, and would change the mean magnitude
                average *= (
                    torch.arange(self.layout.bucket, device=average.device) < self.entries[part.start : part.stop]
                )
            self._compress(average, part, row, ranks, codes, scales)

    def _compress(self, x: Tensor, part: BucketRange, row: int, ranks: int, codes: Tensor, scales: Tensor) -> None:
        """Encode x (buckets, bucket), a mean over `ranks` ranks; store its codes and scales, and `ranks` times its
        coding errors."""
        first = row * self.layout.buckets
        block = slice(part.start - first, part.stop - first)
        levels, scale = self.codec.encode(x, self.entries[part.start : part.stop], self.noise)
        codes[block], scales[block] = self.codec.pack(levels), scale
        if self.errors:
            part.write(x.addcmul_(levels, scale, value=-1).mul_(ranks), self.errors)

    def decode(self, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        if self.errors:
            foreach_copy_(self.residuals, self.errors)
        codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
        for part in self.layout.parts(self.step):
            block = slice(part.start, part.stop)
            part.write(self.codec.unpack(codes[block]) * scales[block], self.flats)


class QuantizeCodec(ReduceScatterCodec):
    """Quantises entries to integers of `bits` bits times a scale per bucket, derived from the largest magnitude in the
    bucket.

    The levels are symmetric about zero, so that a zero stays exactly zero. If zeros did not stay zero, embedding rows
    that no token used would receive noise, which Adam would turn into full-size steps.

    Args:
        rounding: "stochastic" is unbiased and needs no error feedback; "nearest" has a smaller error, but needs error
            feedback.
    """

    compiled = True

    def __init__(
        self,
        bits: Literal[4, 8] = 8,
        *,
        bucket: int = 512,
        rounding: Literal["nearest", "stochastic"] = "stochastic",
        feedback: bool = False,
        seed: int = 0,
    ) -> None:
        if bits not in (4, 8):  # with other widths the C functions would write beyond the codes
            raise ValueError(f"bits must be 4 or 8, got {bits}")
        super().__init__(bits, bucket=bucket, feedback=feedback, seed=seed)
        self.rounding, self.top, self.stochastic = rounding, 2 ** (bits - 1) - 1, rounding == "stochastic"
        self.offset = self.top if bits < 8 else 0

    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).div_(self.top)
        q = x * scale.reciprocal().nan_to_num_(0, posinf=0)
        if self.rounding == "nearest":
            return q.round_(), scale
        add_noise_(q, noise)
        return q.round_().clamp_(-self.top, self.top), scale


def draw_seed(seed: int, context: ExchangeContext, grads: Grads) -> int:
    """Derive a 56-bit seed that differs between ranks, steps, and sets of gradients."""
    words = repr((seed, context.step, context.rank, *grads)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())


def make_generator(seed: int, context: ExchangeContext, grads: Grads) -> torch.Generator:
    """Make a generator whose noise differs between ranks, steps, and sets of gradients."""
    device = next(iter(grads.values())).device
    return torch.Generator(device).manual_seed(draw_seed(seed, context, grads))


def add_noise_(q: Tensor, noise: torch.Generator) -> None:
    """Add uniform noise in (-½, ½), which makes rounding to the nearest integer stochastic and unbiased.

    The noise has 16 bits. Four numbers are drawn at a time, because torch draws a 64-bit integer as fast as an fp32
    number on the CPU.
    """
    for part in q.view(-1).split(BLOCK if q.device.type == "cpu" else max(q.numel(), 1)):
        drawn = torch.empty(-(-len(part) // 4), dtype=torch.int64, device=q.device)
        drawn.random_(-(2**63), None, generator=noise)
        part.add_(drawn.view(torch.int16)[: len(part)], alpha=2.0**-16).add_(2.0**-17)
