"""Computes TernGrad's levels with Triton kernels, which read gradients twice and write them once.

Memory traffic in bytes per entry, for gradients of g bytes per entry and N ranks: measuring reads g; encoding reads g
and writes 1/4; decoding reads N / 4 and writes g. Torch's operations would use five intermediate fp32 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.comm.codecs.bits import packed_bytes
from shoestring.comm.codecs.buckets import BucketLayout
from shoestring.comm.codecs.kernel_buckets import EntryTable, keys, row_stride

BUCKET = 1024  # entries per bucket; a tensor's last bucket is padded
BLOCK = 1024  # number of buckets whose sums of squares are added at once
BITS = 2
LARGE = {"block": 4096, "warps": 4}  # launch settings of kernels that write little or nothing


class TernaryEntries:
    """The entries of contiguous tensors in fp32, bf16 or fp16, which kernels encode and decode."""

    def __init__(self, flats: Sequence[Tensor]) -> None:
        self.layout = BucketLayout(flats, 1, BUCKET)
        self.table = EntryTable(self.layout, flats, [], BITS)

    def scales(self, clip: float) -> Tensor:
        """The largest magnitude of each tensor, limited to `clip` times the tensor's root mean square; (tensors,) in
        fp32."""
        from shoestring.comm.codecs import ternary_kernel

        tensors, buckets = len(self.layout.sizes), self.layout.buckets
        most, squares = torch.empty(2, buckets, device=self.layout.device).unbind()
        self.table.launch(ternary_kernel.measure, buckets, most, squares, buckets, self.table.shape, **LARGE)
        scales = torch.empty(tensors, device=self.layout.device)
        ternary_kernel.scale[(tensors,)](self.table.table, most, squares, scales, tensors, clip, BLOCK=BLOCK)
        return scales

    def encode(self, scales: Tensor, seed: int) -> Tensor:
        """Quantise the entries to levels -1, 0 and 1 by stochastic rounding with noise from `seed`; returns codes
        (buckets, bytes)."""
        from shoestring.comm.codecs import ternary_kernel

        buckets = self.layout.buckets
        codes = torch.empty(buckets, packed_bytes(BUCKET, BITS), dtype=torch.uint8, device=self.layout.device)
        args = (scales, codes, buckets, self.table.shape, *keys(seed))
        self.table.launch(ternary_kernel.encode, buckets, *args, **LARGE)
        return codes

    def decode(self, codes: Tensor, scales: Tensor) -> None:
        """Decode the codes (ranks, buckets, bytes) of all ranks, and replace the gradients by the mean over ranks."""
        from shoestring.comm.codecs import ternary_kernel

        buckets = self.layout.buckets
        args = (scales, codes, buckets, row_stride(codes), self.table.shape)
        self.table.launch(ternary_kernel.decode, buckets, *args, RANKS=len(codes))
