"""2:4 sparse matrix products on a GPU's sparse units by cuSPARSELt, used where they are faster than dense products.

The first product of a shape runs a trial: it finds cuSPARSELt's fastest algorithm, and compares its time, including
packing, with the time of the dense product. Products of the shape stay dense if the dense product is faster, or if the
sparse result differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from shoestring._torch import cslt_compress, cslt_sparse_mm, cslt_sparse_mm_search, sparse_semi_structured_tile

log = logging.getLogger("shoestring")

MULTIPLE = 16  # in 16-bit types cuSPARSELt requires token counts and weight sizes that are multiples of this
TILE_MULTIPLE = 128  # torch's tile kernel requires row and column counts that are multiples of this
RUNS, ROUNDS = 10, 5  # a trial times each product in 5 rounds of 10 runs
WORTHWHILE = 1.02  # smallest speed-up for which a sparse product is used; smaller speed-ups are timer noise
TOLERANCE = 0.02  # largest accepted relative difference of results; 16-bit products differ by about 2⁻⁸
COMPARED = 512  # maximum number of rows compared, evenly spaced, so that a trial needs little memory
PROBES = 64  # number of random vectors that a packed matrix is multiplied by, to check the packing


@dataclass(frozen=True)
class ProductTrial:
    """The result of the trial for one shape of product."""

    faster: bool
    """Whether the sparse product is faster; if so, all products of this shape run sparse."""
    algorithm: int
    """cuSPARSELt's number of the fastest algorithm."""
    speedup: float
    """Time of the dense product divided by the time of the sparse product with packing; 0 if the sparse product
    failed."""


trials: dict[tuple[Any, ...], ProductTrial] = {}
"""Trials run in this process, by device, type, shape and layouts."""
tiled: dict[tuple[Any, ...], bool] = {}
"""Whether torch's tile kernel packs in the format that cuSPARSELt reads, by (device, type, shape); tested once per
key."""


def speedups() -> dict[str, float]:
    """The measured speed-ups, by shape; the smallest one if several layouts were tried."""
    smallest: dict[str, float] = {}
    for (_, _, (rows, columns), tokens, *_), trial in trials.items():
        name = f"{rows} x {columns}, {tokens} columns"
        smallest[name] = min(trial.speedup, smallest.get(name, trial.speedup))
    return smallest


@cache
def available(device: torch.device) -> bool:
    """Whether this build of torch can use cuSPARSELt on this device: a GPU of compute capability 8.0 or later."""
    if device.type != "cuda" or not torch.backends.cusparselt.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def usable(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> bool:
    """Whether sparse products of this type and shape are possible; uses only information known at compile time."""
    fits = dtype in (torch.bfloat16, torch.float16) and not any(size % MULTIPLE for size in shape)
    return fits and available(device)


def capturing() -> bool:
    """Whether a CUDA graph is being captured; during capture, nothing can be timed, and no cached tensors may be
    used."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def readable(dense: Tensor) -> Tensor:
    """The dense operand in a layout that cuSPARSELt reads, row-major or column-major; copied if it has neither.

    Torch assumes that a non-contiguous tensor is the transpose of a contiguous one. Torch would read the wrong memory
    for a slice or an expanded gradient.
    """
    return dense if dense.is_contiguous() or dense.t().is_contiguous() else dense.contiguous()


def multiplied(packed: Tensor, dense: Tensor, algorithm: int, *, by_columns: bool = False) -> Tensor:
    """dense (n, k) times the transpose of a packed (m, k) -> (n, m), row-major or column-major."""
    result = cslt_sparse_mm(packed, dense.t(), transpose_result=not by_columns, alg_id=algorithm)
    return result.t() if by_columns else result


@dataclass(frozen=True)
class ProductChoice:
    """A product that can run sparse or dense: dense (n, k) times the transpose of a sparse (m, k) -> (n, m)."""

    shape: tuple[int, int]
    """(m, k), the shape of the sparse operand."""
    dense: Tensor
    """The dense operand; (n, k)."""
    pack: Callable[[], Sequence[Tensor]]
    """Packs the sparse operand. The result may be followed by other matrices packed at the same time, which share the
    cost."""
    dense_product: Callable[[], Tensor]
    """Computes the same product as a dense product."""
    by_columns: bool
    """Whether the result is column-major."""

    def trial(self) -> ProductTrial | None:
        """The trial of this shape, run at the shape's first product; None if sizes do not fit, or while a CUDA graph is
        captured."""
        tokens = self.dense.shape[0]
        if not self.dense.numel() or any(size % MULTIPLE for size in (tokens, *self.shape)):
            return None
        key = (self.dense.device, self.dense.dtype, self.shape, tokens, self.dense.is_contiguous(), self.by_columns)
        if key not in trials and not capturing():
            trials[key] = self._tried()
        return trials.get(key)

    def _tried(self) -> ProductTrial:
        """Find the fastest algorithm, compare its result with the dense result, and time both products."""
        shape = " x ".join(map(str, self.shape))
        try:
            (packed, *others), expected = self.pack(), _some_rows(self.dense_product())
            multiply = partial(multiplied, packed, self.dense, by_columns=self.by_columns)
            fastest = cslt_sparse_mm_search(packed, self.dense.t(), transpose_result=not self.by_columns)
            # The search may be wrong, so its result is timed against the default algorithm, 0.
            algorithm = min({0, fastest}, key=lambda number: _seconds(partial(multiply, number)))
            result = _some_rows(multiply(algorithm))
        except RuntimeError as error:
            log.warning("sparse: products with a weight of %s stay dense: cuSPARSELt fails: %s", shape, error)
            return ProductTrial(faster=False, algorithm=0, speedup=0.0)
        if not (result - expected).norm() <= TOLERANCE * expected.norm():
            log.warning("sparse: products with a weight of %s stay dense: cuSPARSELt's result differs", shape)
            return ProductTrial(faster=False, algorithm=algorithm, speedup=0.0)
        works = (self.dense_product, partial(multiply, algorithm), self.pack)
        rounds = [[_seconds(work) for work in works] for _ in range(ROUNDS)]  # interleaved, because clock rates drift
        speedup = median(dense / (sparse + packing / (1 + len(others))) for dense, sparse, packing in rounds)
        return ProductTrial(faster=speedup >= WORTHWHILE, algorithm=algorithm, speedup=speedup)


def _some_rows(result: Tensor) -> Tensor:
    """At most COMPARED evenly spaced rows, in fp32."""
    return result[:: -(-len(result) // COMPARED)].float()


def _seconds(work: Callable[[], object]) -> float:
    return Timer("work()", globals={"work": work}).timeit(RUNS).mean


def times(sparse: Tensor, dense: Tensor) -> Tensor:
    """Multiply a matrix that is 2:4 along rows (m, k) by a dense matrix (k, n) -> (m, n); uses a sparse product if it
    is faster."""
    if not usable(dense.dtype, sparse.shape[:1], dense.device) or dense.shape[1] % MULTIPLE:
        return sparse @ dense
    return _times(sparse, dense)


@torch.library.custom_op("shoestring::times_24", mutates_args=())
def _times(sparse: Tensor, dense: Tensor) -> Tensor:
    sparse, dense = sparse.contiguous(), readable(dense)
    shape = sparse.shape[0], sparse.shape[1]

    def pack() -> list[Tensor]:
        return [cslt_compress(sparse)]

    trial = ProductChoice(shape, dense.t(), pack, lambda: (sparse @ dense).t(), by_columns=True).trial()
    if trial is None or not trial.faster:
        return sparse @ dense
    return multiplied(cslt_compress(sparse), dense.t(), trial.algorithm, by_columns=True).t()


@_times.register_fake
def _(sparse: Tensor, dense: Tensor) -> Tensor:
    return dense.new_empty(sparse.shape[0], dense.shape[1])


def tiles_fit(shape: torch.Size, dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]) -> bool:
    """Whether torch's tile kernel packs matrices of this shape in the format that cuSPARSELt reads on this device.

    The kernel writes a layout that torch's authors worked out for Ampere; cuSPARSELt does not document this layout. The
    kernel is therefore tested once per shape: the matrix that `make` returns and its transpose are packed and
    multiplied with random numbers.
    """
    key = (device, dtype, tuple(shape))
    if any(size % TILE_MULTIPLE for size in shape):
        return False
    if key not in tiled and not capturing():
        tiled[key] = _packs_right(make())
    return tiled.get(key, False)


def _packs_right(pruned: Tensor) -> bool:
    try:
        for packed, matrix in zip(packed_both(pruned), (pruned, pruned.t()), strict=True):
            draw = torch.Generator(pruned.device).manual_seed(0)
            probe = torch.randn(PROBES, matrix.shape[1], generator=draw, dtype=pruned.dtype, device=pruned.device)
            expected = (probe @ matrix.t()).float()
            if not (multiplied(packed, probe, 0).float() - expected).norm() <= TOLERANCE * expected.norm():
                return False
    except RuntimeError:
        return False
    return True


def packed_both(pruned: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a matrix that is 2:4 in rows and columns of every 4×4 tile, and its transpose, in one pass.

    Torch's tile kernel keeps the largest magnitudes of a tile, two in each row and column. A matrix that is already 2:4
    keeps all of its entries. The kernel reads 2 bytes per entry and writes 2 · 9/8 bytes. cuSPARSELt would read the
    matrix twice, and need 4 bytes more per entry to transpose it.
    """
    straight, _, transposed, _, _ = sparse_semi_structured_tile(
        pruned, algorithm="largest_abs_values_greedy", use_cutlass=False
    )
    return straight, transposed
