"""Quantises buckets with Triton kernels that read and write each entry once.

`quantize.Buckets` describes the operations. Encoding already updates the residuals (unlike on a CPU), while gradients
stay unchanged until decoding; a failed exchange is undone from the codes that were sent. Memory traffic in bytes per
entry, for gradients of g bytes per entry, codes of c = bits / 8 bytes per entry and N ranks (the 4 bytes of a bucket's
scale are not counted):

- encoding: g + 4 bytes are read and 4 + c written; without error feedback, g bytes are read and c written;
- averaging (one entry in N per rank): g + 4 + (N - 1) c bytes are read and 4 + c written; `measure` also reads g + 4
  bytes;
- decoding: c bytes are read and g written; one residual in N is copied (8 bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.comm.codecs import fused
from shoestring.comm.codecs.bits import packed_bytes
from shoestring.comm.codecs.buckets import BucketLayout
from shoestring.comm.codecs.verdict import ExchangeVerdict

if TYPE_CHECKING:
    from shoestring.comm.codecs.quantize import ReduceScatterCodec

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 2**13
"""Maximum number of entries in a bucket; the limit exists because a program holds its buckets in registers."""
BLOCK, WARPS = 1024, 2  # minimum entries and warps per program: the best of six choices on an H100


class KernelBuckets:
    """`quantize.Buckets` for contiguous tensors in fp32, bf16 and fp16.

    Args:
        codec: codec that defines the quantisation levels.
        seed: seed of the noise for stochastic rounding; None rounds to nearest.
    """

    def __init__(
        self,
        codec: ReduceScatterCodec,
        layout: BucketLayout,
        flats: Sequence[Tensor],
        residuals: Sequence[Tensor],
        seed: int | None,
        verdict: ExchangeVerdict,
    ) -> None:
        self.layout, self.verdict, self.seed = layout, verdict, seed
        self.table = EntryTable(layout, flats, residuals, codec.bits)
        self.form = {"BITS": codec.bits, "OFFSET": codec.offset, "SHIFT": codec.shift}
        self.feedback = {"FEEDBACK": bool(residuals)}
        self.top = {"TOP": codec.top}
        self.sent: tuple[Tensor, Tensor] | None = None
        self.row = 0
        self.errors: Tensor | None = None

    def measure(self, row: int, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        self.row = row
        self._encode(slice(row, row + 1), scales, scales, measure=True)

    def encode(self, rows: slice, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        if len(codes):
            self._encode(rows, codes, scales, measure=False)

    def _encode(self, rows: slice, codes: Tensor, scales: Tensor, *, measure: bool) -> None:
        from shoestring.comm.codecs import bucket_kernel

        first = rows.start * self.layout.buckets
        ends = (first, first + len(scales))
        constants = {**self.feedback, **self.form, **self.top, "MEASURE": measure, "STOCHASTIC": self.seed is not None}
        self.table.launch(
            bucket_kernel.encode, len(scales), (codes, scales, *ends), self.table.shape, *keys(self.seed), **constants
        )

    def encode_average(self, row: int, sent: Tensor, sent_scales: Tensor, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        from shoestring.comm.codecs import bucket_kernel

        first = row * self.layout.buckets
        if self.feedback["FEEDBACK"]:
            self.errors = torch.empty(len(scales), self.layout.bucket, device=self.layout.device)
        errors = scales if self.errors is None else self.errors
        tensors = (sent, sent_scales, codes, scales, errors, first, first + len(scales))
        strides = (row, row_stride(sent), row_stride(sent_scales))
        constants = {
            **self.feedback,
            **self.form,
            **self.top,
            "STOCHASTIC": self.seed is not None,
            "RANKS": self.layout.rows,
        }
        self.table.launch(
            bucket_kernel.encode_average,
            len(scales),
            tensors,
            self.table.shape,
            *strides,
            *keys(self.seed),
            **constants,
        )

    def remember(self, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        self.sent = (codes, scales)

    def decode(self, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        self._decode(codes, scales, self.verdict.flag(self.layout.device))

    def give_up(self) -> None:
        """See `quantize.Buckets`."""
        assert self.sent is not None
        self._decode(*self.sent, torch.zeros(1, dtype=torch.uint8, device=self.layout.device))

    def _decode(self, codes: Tensor, scales: Tensor, fine: Tensor) -> None:
        from shoestring.comm.codecs import bucket_kernel

        rows, row_buckets = self.layout.rows, self.layout.buckets
        sent = (codes, scales) if self.sent is None else self.sent
        errors = scales if self.errors is None else self.errors
        self.table.launch(
            bucket_kernel.decode,
            rows * row_buckets,
            (codes, scales, *sent, errors, fine, rows, row_buckets, self.row),
            self.table.shape,
            row_stride(codes),
            row_stride(scales),
            **self.feedback,
            **self.form,
        )


class EntryTable:
    """Table of the addresses of many tensors, so that one kernel launch processes the buckets of all of them."""

    def __init__(self, layout: BucketLayout, flats: Sequence[Tensor], residuals: Sequence[Tensor], bits: int) -> None:
        kinds = [TYPES.index(flat.dtype) for flat in flats]
        columns = (
            [flat.data_ptr() for flat in flats],
            [residual.data_ptr() for residual in residuals] or [0] * len(flats),
            layout.sizes,
            layout.starts[:-1],
            kinds,
        )
        table = torch.tensor([[*column, 0] for column in columns])
        table[3, -1] = layout.starts[-1]
        pinned = table.pin_memory() if layout.device.type == "cuda" else table
        self.table = pinned.to(layout.device, non_blocking=True)
        width, tensors = packed_bytes(layout.bucket, bits), len(flats)
        self.per, self.wide = 8 // bits, 1 << (width - 1).bit_length()
        self.shape, self.depth = (tensors, layout.bucket, width), (tensors - 1).bit_length()
        aligned = all(address % 16 == 0 for column in columns[:2] for address in column) and width % 8 == 0
        self.kinds, self.aligned = sorted(set(kinds)), aligned

    def launch(
        self, kernel: Any, buckets: int, *args: Any, block: int = BLOCK, warps: int = WARPS, **constants: Any
    ) -> None:
        """Launch a kernel over `buckets` buckets, once for each data type; see `BLOCK`."""
        import triton.language as tl

        flat = [value for arg in args for value in (arg if isinstance(arg, tuple) else (arg,))]
        rows = max(1, block // (self.per * self.wide))
        grid = (-(-buckets // rows),)
        for kind in self.kinds:
            kernel[grid](
                self.table,
                *flat,
                **constants,
                DEPTH=self.depth,
                KIND=kind,
                FIRST=kind == self.kinds[0],
                TYPE=(tl.float32, tl.bfloat16, tl.float16)[kind],
                ALIGNED=self.aligned,
                ROWS=rows,
                PER=self.per,
                WIDE=self.wide,
                num_warps=warps,
                enable_fp_fusion=False,  # so that a product is rounded before it is added, as on a CPU
            )


def keys(seed: int | None) -> tuple[int, int]:
    """Derive the two 31-bit keys of the noise from a seed."""
    return (0, 0) if seed is None else (seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF)


def row_stride(tensor: Tensor) -> int:
    """Stride between the rows of a tensor (rows, buckets, n), in elements; each row must be contiguous."""
    assert tensor[0].is_contiguous()
    return tensor.stride(0)


def take(tensors: Iterable[Tensor], bucket: int) -> bool:
    """Whether the kernels support these tensors in buckets of this size."""
    return bucket <= LARGEST and all(tensor.dtype in TYPES and fused.is_available(tensor.device) for tensor in tensors)
