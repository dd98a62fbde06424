"""Quantises buckets with C functions that read and write each entry once; see `quantize.Buckets` for the operations."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring import native
from shoestring.comm.codecs.buckets import BucketLayout, LateBuckets

LARGEST = 2**14
"""Maximum number of entries in a bucket; the limit exists because a thread holds two buckets on its stack."""


class Kernels(NamedTuple):
    """The C functions of `buckets.c`."""

    encode: Any
    encode_average: Any
    decode: Any


@cache
def kernels() -> Kernels | None:
    """The C functions, compiled at the first call; None if this machine cannot compile them."""
    size, pointer, whole = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    first_args = [size, size, pointer, pointer, pointer, pointer, size, size]
    without = "gradients are quantised by torch's operations, which is slower"
    encoded = [*first_args, whole, pointer, pointer, pointer, whole]
    functions = [
        native.function(name, types, without, file="buckets")
        for name, types in (
            ("encode_buckets", encoded),
            ("encode_averages", [*encoded, size, size, pointer, size, pointer, size]),
            ("decode_buckets", [*first_args, whole, pointer, size, pointer, size, whole]),
        )
    ]
    return None if None in functions else Kernels(*functions)


class NativeBuckets(LateBuckets):
    """`quantize.Buckets` for contiguous fp32 tensors on a CPU.

    Args:
        bits: bits per entry, 8 or 4; 1 means signs times mean magnitudes.
        noise: generator for stochastic rounding; None rounds to nearest.
    """

    def __init__(
        self,
        layout: BucketLayout,
        flats: Sequence[Tensor],
        residuals: Sequence[Tensor],
        bits: int,
        noise: torch.Generator | None,
    ) -> None:
        functions = kernels()
        assert functions is not None
        self.kernels, self.layout, self.bits, self.noise = functions, layout, bits, noise
        count, size = len(flats), ctypes.c_int64
        self._first_args = (  # the first arguments of every function
            count,
            layout.bucket,
            (size * count)(*layout.sizes),
            (size * (count + 1))(*layout.starts),
            _addresses(flats),
            _addresses(residuals) if residuals else None,
        )

    def measure(self, row: int, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        self._encode(slice(row, row + 1), None, scales)

    def encode(self, rows: slice, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        self._encode(rows, codes, scales)

    def _encode(self, rows: slice, codes: Tensor | None, scales: Tensor) -> None:
        noise = None if codes is None else self._draw(len(codes))
        into = None if codes is None else codes.data_ptr()
        self.kernels.encode(*self._args(rows, noise), into, scales.data_ptr(), torch.get_num_threads())

    def encode_average(self, row: int, sent: Tensor, sent_scales: Tensor, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        noise = self._draw(len(codes))
        args = self._args(slice(row, row + 1), noise)
        into = (codes.data_ptr(), scales.data_ptr(), torch.get_num_threads())
        self.kernels.encode_average(*args, *into, self.layout.rows, row, *_rows(sent), *_rows(sent_scales))

    def decode(self, codes: Tensor, scales: Tensor) -> None:
        """See `quantize.Buckets`."""
        size = (self.layout.rows, self.layout.buckets)
        self.kernels.decode(*self._first_args, *size, self.bits, *_rows(codes), *_rows(scales), torch.get_num_threads())

    def _args(self, rows: slice, noise: Tensor | None) -> tuple[Any, ...]:
        ends = (rows.start * self.layout.buckets, rows.stop * self.layout.buckets)
        return (*self._first_args, *ends, self.bits, None if noise is None else noise.data_ptr())

    def _draw(self, buckets: int) -> Tensor | None:
        """Draw 16 random bits for each entry."""
        if self.noise is None:
            return None
        longs = -(-buckets * self.layout.bucket // 4)  # 64 random bits serve four entries
        return torch.empty(longs, dtype=torch.int64).random_(-(2**63), None, generator=self.noise)


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Address of a tensor (rows, buckets, n), and the stride between rows in elements; each row must be contiguous."""
    assert tensor[0].is_contiguous()
    return tensor.data_ptr(), tensor.stride(0)


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
