"""Copies many tensors from a GPU to pinned memory by a single call of the CUDA driver.

One call per tensor would take the driver's lock thousands of times, and the training thread would often have to wait
for the lock before a kernel launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: use the copy engines


class Location(ctypes.Structure):
    """CUDA's struct CUmemLocation; with all zeros, the driver determines the location from the pointer."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUDA's CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", Location),
        ("target", Location),
        ("flags", ctypes.c_uint),
    )


@cache
def batched_copy() -> Callable[..., int] | None:
    """Return the driver's `cuMemcpyBatchAsync` with the arguments of CUDA 13, also for CUDA 12.8; None if the driver
    lacks this function."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if current := getattr(driver, "cuMemcpyBatchAsync_v2", None):
        return current
    earlier: Any = getattr(driver, "cuMemcpyBatchAsync", None)
    if earlier is None:
        return None
    failed = ctypes.c_size_t()  # output argument (index of the failed copy), which CUDA 13 has removed
    return lambda *arguments: earlier(*arguments[:-1], ctypes.byref(failed), arguments[-1])


def copy_from_gpu(targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
    """Issue copies of all sources to their targets on a stream, which must be this thread's current stream.

    Sources in host memory, such as the state of some optimizers, are copied by torch before this function returns,
    because the host may change them without waiting for the stream.
    """
    pairs, batched, single = list(zip(targets, sources, strict=True)), [], []
    for pair in pairs:
        (batched if is_plain(*pair) else single).append(pair)
    copy = batched_copy()
    if copy is None or not batched or copy(*arguments(batched), ctypes.c_void_p(stream.cuda_stream)):
        single = pairs
    if single:
        with torch.no_grad():
            foreach_copy_([target for target, _ in single], [source for _, source in single], non_blocking=True)


def is_plain(target: Tensor, source: Tensor) -> bool:
    """Whether a copy only moves bytes from a GPU: both tensors have the same data type, are contiguous, and have no
    lazy conjugation or negation."""
    as_they_lie = target.is_contiguous() and source.is_contiguous() and not (source.is_conj() or source.is_neg())
    return is_on_gpu(source) and as_they_lie and target.dtype == source.dtype and source.numel() > 0


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def arguments(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, ...]:
    """Build the arguments of `cuMemcpyBatchAsync`, except for the stream, from (target, source) pairs."""
    count = len(pairs)
    addresses = ctypes.c_uint64 * count
    attributes = CopyAttributes(order=IN_STREAM_ORDER, flags=BESIDE_KERNELS)
    return (
        addresses(*[target.data_ptr() for target, _ in pairs]),
        addresses(*[source.data_ptr() for _, source in pairs]),
        (ctypes.c_size_t * count)(*[target.nbytes for target, _ in pairs]),
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        ctypes.byref(ctypes.c_size_t(0)),
        ctypes.c_size_t(1),
    )
