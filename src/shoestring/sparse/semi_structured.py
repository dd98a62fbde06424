"""Products with a 2:4 operand on the sparse units of a GPU, through cuSPARSELt, where they are faster than dense ones.

The operand is a dense tensor with zeros, compressed for each product: a pass over its memory, which is little beside
a product that is worth it. Whether it is worth it is found by trying: at the first product of a shape the fastest
algorithm is searched, and its time, compression included, compared with that of the dense product. Where the dense one
is faster, or the sparse one gives another result, products of that shape stay dense.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from shoestring._torch import cslt_compress, cslt_sparse_mm, cslt_sparse_mm_search

log = logging.getLogger("shoestring")

MULTIPLE = 16  # cuSPARSELt's, of both sizes of the sparse operand and of the other's free size, in 16-bit types
RUNS, ROUNDS = 10, 5  # of each product that a trial times
WORTHWHILE = 1.02  # times as fast as the dense product, at least: less is the timer's noise
TOLERANCE = 0.02  # of the norm of a result; products of 16-bit numbers differ by some 2⁻⁸


@dataclass(frozen=True)
class ProductTrial:
    """The measured speed of the products of one shape."""

    faster: bool
    algorithm: int
    speedup: float
    """Time of the dense product over that of the sparse one, compression included; 0 where that failed."""


trials: dict[tuple[Any, ...], ProductTrial] = {}
"""By device, type and shape; of this process."""


@cache
def available(device: torch.device) -> bool:
    """Whether this device multiplies 2:4 matrices, by this build of torch."""
    if device.type != "cuda" or not torch.backends.cusparselt.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def usable(dense: Tensor, sparse: Tensor) -> bool:
    """Whether products of these operands are tried at all; by what is known when a graph is compiled."""
    return (
        dense.dtype == sparse.dtype
        and dense.dtype in (torch.bfloat16, torch.float16)
        and sparse.shape[0] % MULTIPLE == 0
        and available(dense.device)
    )


def times_transposed(dense: Tensor, sparse: Tensor) -> Tensor:
    """dense (…, k) times the transpose of sparse (m, k), 2:4 in its rows -> (…, m)."""
    if not usable(dense, sparse) or sparse.shape[1] % MULTIPLE:
        return dense @ sparse.t()
    return _times_transposed(dense.flatten(0, -2), sparse).unflatten(0, dense.shape[:-1])


def times(sparse: Tensor, dense: Tensor) -> Tensor:
    """sparse (m, k), 2:4 in its rows, times dense (k, n) -> (m, n)."""
    if not usable(dense, sparse) or dense.shape[1] % MULTIPLE:
        return sparse @ dense
    return _times(sparse, dense)


@torch.library.custom_op("shoestring::times_transposed_24", mutates_args=())
def _times_transposed(dense: Tensor, sparse: Tensor) -> Tensor:
    def of_compressed(packed: Tensor, algorithm: int) -> Tensor:
        return cslt_sparse_mm(packed, dense.t(), transpose_result=True, alg_id=algorithm)

    def search(packed: Tensor) -> int:
        return cslt_sparse_mm_search(packed, dense.t(), transpose_result=True)

    return _faster(sparse, dense.shape[0], of_compressed, search, lambda: dense @ sparse.t())


@_times_transposed.register_fake
def _(dense: Tensor, sparse: Tensor) -> Tensor:
    return dense.new_empty(dense.shape[0], sparse.shape[0])


@torch.library.custom_op("shoestring::times_24", mutates_args=())
def _times(sparse: Tensor, dense: Tensor) -> Tensor:
    def of_compressed(packed: Tensor, algorithm: int) -> Tensor:
        return cslt_sparse_mm(packed, dense, alg_id=algorithm)

    def search(packed: Tensor) -> int:
        return cslt_sparse_mm_search(packed, dense)

    return _faster(sparse, -dense.shape[1], of_compressed, search, lambda: sparse @ dense)


@_times.register_fake
def _(sparse: Tensor, dense: Tensor) -> Tensor:
    return dense.new_empty(sparse.shape[0], dense.shape[1])


def _faster(
    sparse: Tensor,
    other: int,
    of_compressed: Callable[[Tensor, int], Tensor],
    search: Callable[[Tensor], int],
    dense_product: Callable[[], Tensor],
) -> Tensor:
    """The product by whichever way is faster.

    Args:
        other: the free size of the dense operand, with another sign where the sparse one comes first.
    """
    if other % MULTIPLE or sparse.shape[1] % MULTIPLE:  # tokens, which need not be known when a graph is compiled
        return dense_product()
    key = (sparse.device, sparse.dtype, tuple(sparse.shape), other)
    trial = trials.get(key)
    if trial is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return dense_product()  # nothing can be timed inside a CUDA graph
        trial = trials[key] = _tried(sparse, of_compressed, search, dense_product)
    if not trial.faster:
        return dense_product()
    return of_compressed(cslt_compress(sparse.contiguous()), trial.algorithm)


def _tried(
    sparse: Tensor,
    of_compressed: Callable[[Tensor, int], Tensor],
    search: Callable[[Tensor], int],
    dense_product: Callable[[], Tensor],
) -> ProductTrial:
    shape = " x ".join(map(str, sparse.shape))
    try:
        algorithm = search(cslt_compress(sparse.contiguous()))

        def sparse_product() -> Tensor:
            return of_compressed(cslt_compress(sparse.contiguous()), algorithm)

        expected, result = dense_product().float(), sparse_product().float()
    except RuntimeError as error:
        log.warning("sparse: products with a weight of %s stay dense: cuSPARSELt fails: %s", shape, error)
        return ProductTrial(faster=False, algorithm=0, speedup=0.0)
    if not (result - expected).norm() <= TOLERANCE * expected.norm():
        log.warning("sparse: products with a weight of %s stay dense: cuSPARSELt's result differs from torch's", shape)
        return ProductTrial(faster=False, algorithm=algorithm, speedup=0.0)
    speedup = _speedup(dense_product, sparse_product)
    return ProductTrial(faster=speedup >= WORTHWHILE, algorithm=algorithm, speedup=speedup)


def _speedup(dense_product: Callable[[], Tensor], sparse_product: Callable[[], Tensor]) -> float:
    """The median of some rounds, in each of which both take their turn."""
    timers = [Timer("product()", globals={"product": product}) for product in (dense_product, sparse_product)]
    rounds = [[timer.timeit(RUNS).mean for timer in timers] for _ in range(ROUNDS)]
    return median(dense / sparse for dense, sparse in rounds)
