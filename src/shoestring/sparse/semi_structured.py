"""Products with a 2:4 operand on the sparse units of a GPU, through cuSPARSELt, where they are faster than dense ones.

Whether one is faster is found by trying: at the first product of a shape the fastest algorithm is searched, and its
time, the packing of the operand included, compared with that of the dense product. Where the dense one is faster, or
the sparse one gives another result, products of that shape stay dense.
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

MULTIPLE = 16  # cuSPARSELt's, of both sizes of the sparse operand and of the other's free size, in 16-bit types
TILE_MULTIPLE = 128  # of both sizes of a matrix that torch's tile kernel packs
RUNS, ROUNDS = 10, 5  # of each product that a trial times
WORTHWHILE = 1.02  # times as fast as the dense product, at least: less is the timer's noise
TOLERANCE = 0.02  # of the norm of a result; products of 16-bit numbers differ by some 2⁻⁸
COMPARED = 512  # rows of a result at most, spread evenly, so that a trial needs little memory beside both results
PROBES = 64  # columns that packed matrices are multiplied with to see whether they are packed right


@dataclass(frozen=True)
class ProductTrial:
    """The measured speed of the products of one shape."""

    faster: bool
    algorithm: int
    speedup: float
    """Time of the dense product over that of the sparse one, packing included; 0 where that failed."""


trials: dict[tuple[Any, ...], ProductTrial] = {}
"""By device, type, shape and layouts; of this process."""
tiled: dict[tuple[Any, ...], bool] = {}
"""Whether torch's tile kernel packs as cuSPARSELt does, by device, type and shape; of this process."""


def speedups() -> dict[str, float]:
    """The speed-ups of the products that were tried, by their sizes; of several layouts, the least."""
    found: dict[str, float] = {}
    for (_, _, (rows, columns), tokens, *_), trial in trials.items():
        name = f"{rows} x {columns}, {tokens} columns"
        found[name] = min(trial.speedup, found.get(name, trial.speedup))
    return found


@cache
def available(device: torch.device) -> bool:
    """Whether this device multiplies 2:4 matrices, by this build of torch."""
    if device.type != "cuda" or not torch.backends.cusparselt.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def usable(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> bool:
    """Whether products with a sparse operand of this shape are tried at all; known when a graph is compiled."""
    fits = dtype in (torch.bfloat16, torch.float16) and not any(size % MULTIPLE for size in shape)
    return fits and available(device)


def capturing() -> bool:
    """Whether a CUDA graph is recorded: nothing can be timed then, and what a graph reads it must compute itself."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def readable(dense: Tensor) -> Tensor:
    """A dense operand in one of the two layouts that cuSPARSELt reads: by rows or by columns.

    torch takes any tensor that is not contiguous for the transpose of one that is, and would read beside an expanded
    gradient or a slice.
    """
    return dense if dense.is_contiguous() or dense.t().is_contiguous() else dense.contiguous()


def multiplied(packed: Tensor, dense: Tensor, algorithm: int, *, by_columns: bool = False) -> Tensor:
    """dense (n, k) times the transpose of a packed (m, k) -> (n, m), by rows or by columns."""
    result = cslt_sparse_mm(packed, dense.t(), transpose_result=not by_columns, alg_id=algorithm)
    return result.t() if by_columns else result


@dataclass(frozen=True)
class ProductChoice:
    """One product, by both ways: dense (n, k) times the transpose of a sparse (m, k) -> (n, m)."""

    shape: tuple[int, int]
    """Of the sparse operand."""
    dense: Tensor
    pack: Callable[[], Sequence[Tensor]]
    """Packs the sparse operand, and after it what is packed at the same time, which bears its part of the cost."""
    dense_product: Callable[[], Tensor]
    by_columns: bool

    def trial(self) -> ProductTrial | None:
        """Which way is faster, tried once for a shape; None where nothing can be tried, or the sizes do not fit."""
        tokens = self.dense.shape[0]  # need not be known when a graph is compiled
        if not self.dense.numel() or any(size % MULTIPLE for size in (tokens, *self.shape)):
            return None
        key = (self.dense.device, self.dense.dtype, self.shape, tokens, self.dense.is_contiguous(), self.by_columns)
        if key not in trials and not capturing():
            trials[key] = self._tried()
        return trials.get(key)

    def _tried(self) -> ProductTrial:
        shape = " x ".join(map(str, self.shape))
        try:
            (packed, *others), expected = self.pack(), _some_rows(self.dense_product())
            multiply = partial(multiplied, packed, self.dense, by_columns=self.by_columns)
            found = cslt_sparse_mm_search(packed, self.dense.t(), transpose_result=not self.by_columns)
            algorithm = min({0, found}, key=lambda each: _seconds(partial(multiply, each)))  # the search may err
            result = _some_rows(multiply(algorithm))
        except RuntimeError as error:
            log.warning("sparse: products with a weight of %s stay dense: cuSPARSELt fails: %s", shape, error)
            return ProductTrial(faster=False, algorithm=0, speedup=0.0)
        if not (result - expected).norm() <= TOLERANCE * expected.norm():
            log.warning("sparse: products with a weight of %s stay dense: cuSPARSELt's result differs", shape)
            return ProductTrial(faster=False, algorithm=algorithm, speedup=0.0)
        ways = (self.dense_product, partial(multiply, algorithm), self.pack)
        rounds = [[_seconds(way) for way in ways] for _ in range(ROUNDS)]
        speedup = median(dense / (sparse + packing / (1 + len(others))) for dense, sparse, packing in rounds)
        return ProductTrial(faster=speedup >= WORTHWHILE, algorithm=algorithm, speedup=speedup)


def _some_rows(result: Tensor) -> Tensor:
    return result[:: -(-len(result) // COMPARED)].float()


def _seconds(work: Callable[[], object]) -> float:
    return Timer("work()", globals={"work": work}).timeit(RUNS).mean


def times(sparse: Tensor, dense: Tensor) -> Tensor:
    """sparse (m, k), 2:4 in its rows, times dense (k, n) -> (m, n)."""
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
    """Whether torch's tile kernel packs matrices of this shape as cuSPARSELt reads them on this device.

    It writes a layout that was found out for Ampere. So it is tried: once for a shape, a matrix that `make` returns is
    packed by it and multiplied with random numbers, in both directions.
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
    """A matrix that is 2:4 in rows and columns of every 4×4 tile, packed, and its transpose, in one pass over it.

    The kernel picks the largest magnitudes of a tile as long as its rows and columns have room. Of such a matrix these
    are its own entries, in any order. It reads 2 bytes an entry and writes 2 · 9/8; cuSPARSELt alone would have to read
    the matrix twice, the second time transposed by a pass of 4 bytes before it.
    """
    straight, _, transposed, _, _ = sparse_semi_structured_tile(
        pruned, algorithm="largest_abs_values_greedy", use_cutlass=False
    )
    return straight, transposed
