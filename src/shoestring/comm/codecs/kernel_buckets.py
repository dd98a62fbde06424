"""Quantised buckets by kernels that read and write each entry once, on devices that Triton compiles for.

`quantize.Buckets` says what they do. Unlike on a CPU, residuals are replaced while entries are encoded, and gradients
stay until they are decoded; an exchange that fails is undone by what was sent. Bytes of memory traffic an entry, where
gradients take g bytes, codes c = bits / 8, and N ranks take part (a bucket's scale is 4 bytes, not counted):

- encoding: g + 4 are read, 4 + c are written; without error feedback g and c;
- averaging, of one entry in N: g + 4 and (N - 1) c are read twice over with `measure`, 4 + c are written;
- decoding: c is read and g written; one in N of the residuals is copied (8).
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
"""Entries of the largest bucket, which a program has in its registers."""
BLOCK, WARPS = 1024, 2  # entries that a program has at least, and its warps: the best of six on an H100


class KernelBuckets:
    """Of contiguous tensors in fp32, bf16 and fp16.

    Args:
        codec: says what its levels are.
        seed: of the noise; None rounds to nearest.
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
        self.kept = {"FEEDBACK": bool(residuals)}
        self.top = {"TOP": codec.top}
        self.sent: tuple[Tensor, Tensor] | None = None
        self.row = 0
        self.errors: Tensor | None = None

    def measure(self, row: int, scales: Tensor) -> None:
        """See `Buckets`."""
        self.row = row
        self._encode(slice(row, row + 1), scales, scales, measure=True)

    def encode(self, rows: slice, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        if len(codes):
            self._encode(rows, codes, scales, measure=False)

    def _encode(self, rows: slice, codes: Tensor, scales: Tensor, *, measure: bool) -> None:
        from shoestring.comm.codecs import bucket_kernel

        first = rows.start * self.layout.buckets
        ends = (first, first + len(scales))
        ways = {**self.kept, **self.form, **self.top, "MEASURE": measure, "STOCHASTIC": self.seed is not None}
        self.table.launch(
            bucket_kernel.encode, len(scales), (codes, scales, *ends), self.table.shape, *keys(self.seed), **ways
        )

    def encode_average(self, row: int, sent: Tensor, of_sent: Tensor, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        from shoestring.comm.codecs import bucket_kernel

        first = row * self.layout.buckets
        if self.kept["FEEDBACK"]:
            self.errors = torch.empty(len(scales), self.layout.bucket, device=self.layout.device)
        errors = scales if self.errors is None else self.errors
        tensors = (sent, of_sent, codes, scales, errors, first, first + len(scales))
        strides = (row, row_stride(sent), row_stride(of_sent))
        ways = {**self.kept, **self.form, **self.top, "STOCHASTIC": self.seed is not None, "RANKS": self.layout.rows}
        self.table.launch(
            bucket_kernel.encode_average, len(scales), tensors, self.table.shape, *strides, *keys(self.seed), **ways
        )

    def remember(self, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        self.sent = (codes, scales)

    def decode(self, codes: Tensor, scales: Tensor) -> None:
        """See `Buckets`."""
        self._decode(codes, scales, self.verdict.flag(self.layout.device))

    def give_up(self) -> None:
        """See `Buckets`."""
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
            **self.kept,
            **self.form,
        )


class EntryTable:
    """Where the entries of many tensors lie, for one launch of a kernel over all of their buckets."""

    def __init__(self, layout: BucketLayout, flats: Sequence[Tensor], residuals: Sequence[Tensor], bits: int) -> None:
        kinds = [TYPES.index(flat.dtype) for flat in flats]
        columns = (
            [flat.data_ptr() for flat in flats],
            [each.data_ptr() for each in residuals] or [0] * len(flats),
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
        aligned = all(place % 16 == 0 for column in columns[:2] for place in column) and width % 8 == 0
        self.kinds, self.aligned = sorted(set(kinds)), aligned

    def launch(
        self, kernel: Any, buckets: int, *args: Any, block: int = BLOCK, warps: int = WARPS, **ways: Any
    ) -> None:
        """Launch a kernel over a number of buckets, once for each data type; see `BLOCK`."""
        import triton.language as tl

        flat = [value for arg in args for value in (arg if isinstance(arg, tuple) else (arg,))]
        rows = max(1, block // (self.per * self.wide))
        grid = (-(-buckets // rows),)
        for kind in self.kinds:
            kernel[grid](
                self.table,
                *flat,
                **ways,
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
    """The two keys of the noise, of 31 bits."""
    return (0, 0) if seed is None else (seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF)


def row_stride(tensor: Tensor) -> int:
    """Elements from one row of a tensor (rows, buckets, n) to the next; a row is contiguous."""
    assert tensor[0].is_contiguous()
    return tensor.stride(0)


def take(tensors: Iterable[Tensor], bucket: int) -> bool:
    """Whether there are kernels for these tensors in buckets of this size."""
    return bucket <= LARGEST and all(each.dtype in TYPES and fused.is_available(each.device) for each in tensors)
