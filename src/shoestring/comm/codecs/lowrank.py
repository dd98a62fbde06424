"""PowerSGD's operations on a matrix M = g + e: products with a thin matrix, the remainder, and decoding.

On a CPU, M is built in scratch memory that fits the cache, or in place of the residual. On devices that Triton compiles
for, M is never written: 24 bytes are read or written for each entry of a bf16 gradient, instead of 46.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.comm.codecs import fused


@dataclass(frozen=True)
class Blocks:
    """Rows and columns that a program processes at a time, and its number of warps."""

    BN: int
    BM: int
    num_warps: int


LEFT, OUTER, WIDE = Blocks(32, 128, 4), Blocks(32, 128, 8), Blocks(32, 64, 4)  # the best of several on an H100
PROGRAMS = 512  # number of programs that keeps a GPU busy
MOST = 64  # the largest rank whose program fits the 99 kB of shared memory of a GeForce
_SMALLEST = 16  # smallest side of a block's product


@dataclass(frozen=True)
class Matrix:
    """One parameter's gradient and residual, (n, m), and the basis from the step before."""

    name: str
    grad: Tensor
    residual: Tensor
    P: Tensor | None  # (n, r); or
    Qt: Tensor | None  # (r, m)

    @property
    def left(self) -> Tensor:
        """P, of a matrix without Qt."""
        assert self.P is not None
        return self.P

    @property
    def by_kernel(self) -> bool:
        thin = (self.left.shape[1] if self.Qt is None else len(self.Qt)) <= MOST
        whole = self.grad.is_contiguous() and self.residual.is_contiguous()
        return thin and whole and fused.is_available(self.grad.device)


def multiply(matrices: Sequence[Matrix]) -> list[Tensor]:
    """M Q, or Pᵀ M, of each matrix; gradients and residuals are unchanged."""
    scratch = None
    products = []
    for matrix in matrices:
        if matrix.by_kernel:
            products.append(_right(matrix, matrix.Qt) if matrix.Qt is not None else _left(matrix, matrix.left))
            continue
        if scratch is None:
            scratch = matrix.residual.new_empty(max(other.residual.numel() for other in matrices))
        M = torch.add(matrix.grad, matrix.residual, out=scratch[: matrix.grad.numel()].view(matrix.grad.shape))
        products.append(M @ matrix.Qt.t() if matrix.Qt is not None else matrix.left.t() @ M)
    return products


def build_sum(matrix: Matrix) -> None:
    """Build M in place of the residual, unless a kernel adds both on the fly."""
    if not matrix.by_kernel:
        matrix.residual.add_(matrix.grad)


def undo_sum(matrix: Matrix) -> None:
    """The inverse of `build_sum`, up to rounding: a residual far smaller than the gradient is rounded to zero."""
    if not matrix.by_kernel:
        matrix.residual.sub_(matrix.grad)


def project(matrix: Matrix, P: Tensor) -> Tensor:
    """Qᵀ = Pᵀ M, after `build_sum`."""
    return _left(matrix, P) if matrix.by_kernel else P.t() @ matrix.residual


def keep_remainder(matrix: Matrix, P: Tensor, Qt: Tensor) -> None:
    """Make M - P Qᵀ the residual, after `build_sum`."""
    if matrix.by_kernel:
        _outer(matrix.grad, matrix.residual, P, Qt, leaving=True)
    else:
        matrix.residual.addmm_(P, Qt, alpha=-1)


def decode(matrix: Matrix, P: Tensor, Qt: Tensor) -> None:
    """Make P Qᵀ the gradient."""
    if matrix.by_kernel:
        _outer(matrix.grad, matrix.residual, P, Qt, leaving=False)
    elif matrix.grad.dtype == P.dtype:
        torch.mm(P, Qt, out=matrix.grad)
    else:
        matrix.grad.copy_(P @ Qt)


# -- by kernels -------------------------------------------------------------------------------------------------------


def _right(matrix: Matrix, Qt: Tensor) -> Tensor:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r = matrix.grad.shape, len(Qt)
    R = _power(r)
    at = WIDE if R >= _SMALLEST else Blocks(64 // R, 128, 4)  # 64 sums a thread
    blocks, steps, splits = _split(n, at.BN, m, at.BM)
    out = matrix.residual.new_empty(splits, n, r)
    inputs = (matrix.grad, matrix.residual, Qt.contiguous(), out, n, m, r)
    lowrank_kernel.right[blocks, splits](*inputs, STEPS=steps, R=R, **vars(at))
    return out.sum(0) if splits > 1 else out[0]


def _left(matrix: Matrix, P: Tensor) -> Tensor:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r, R = matrix.grad.shape, P.shape[1], max(_SMALLEST, _power(P.shape[1]))
    blocks, steps, splits = _split(m, LEFT.BM, n, LEFT.BN)
    out = matrix.residual.new_empty(splits, r, m)
    inputs = (matrix.grad, matrix.residual, P.contiguous(), out, n, m, r)
    lowrank_kernel.left[blocks, splits](*inputs, STEPS=steps, R=R, **vars(LEFT))
    return out.sum(0) if splits > 1 else out[0]


def _outer(grad: Tensor, residual: Tensor, P: Tensor, Qt: Tensor, *, leaving: bool) -> None:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r, R = grad.shape, len(Qt), max(_SMALLEST, _power(len(Qt)))
    blocks = -(-n // OUTER.BN) * -(-m // OUTER.BM)
    inputs = (grad, residual, P.contiguous(), Qt.contiguous(), n, m, r)
    lowrank_kernel.outer[blocks,](*inputs, LEAVE=leaving, R=R, **vars(OUTER))


def _split(kept: int, block: int, summed: int, step: int) -> tuple[int, int, int]:
    """Blocks of the side that is kept; steps of a program along the other side; programs along that side."""
    blocks, steps = -(-kept // block), -(-summed // step)
    steps_each = _power(-(-steps // max(1, PROGRAMS // blocks)))  # few different ones, because each is compiled
    return blocks, steps_each, -(-steps // steps_each)


def _power(least: int) -> int:
    """The smallest power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()
