"""What PowerSGD does with a matrix M = g + e: products with a thin one, what those leave of it, and decoding.

On a CPU, M is built in a place that stays in the cache, or in that of the residual. On devices that Triton compiles
for, M is never written: memory is read or written 24 bytes an entry of a bf16 gradient, in place of 46.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.comm.codecs import fused


@dataclass(frozen=True)
class Blocks:
    """Rows and columns that a program takes at a time, and the warps that it has."""

    BN: int
    BM: int
    num_warps: int


LEFT, OUTER, WIDE = Blocks(32, 128, 4), Blocks(32, 128, 8), Blocks(32, 64, 4)  # the best of some on an H100
PROGRAMS = 512  # so many keep a GPU busy
MOST = 64  # the largest rank for which a program has room in 99 kB, as much as a GeForce shares
_LEAST = 16  # the smallest side of a block's product


@dataclass(frozen=True)
class Matrix:
    """One parameter's gradient and residual, (n, m), and the basis that the step before left."""

    name: str
    grad: Tensor
    residual: Tensor
    P: Tensor | None  # (n, r); or
    Qt: Tensor | None  # (r, m)

    @property
    def by_kernel(self) -> bool:
        thin = (len(self.Qt) if self.P is None else self.P.shape[1]) <= MOST  # pyright: ignore[reportArgumentType]
        whole = self.grad.is_contiguous() and self.residual.is_contiguous()
        return thin and whole and fused.is_available(self.grad.device)


def multiply(matrices: Sequence[Matrix]) -> list[Tensor]:
    """M Q, or Pᵀ M, of each; gradients and residuals stay."""
    scratch = None
    found = []
    for each in matrices:
        if each.by_kernel:
            found.append(_right(each, each.Qt) if each.Qt is not None else _left(each, each.P))  # pyright: ignore
            continue
        if scratch is None:
            scratch = each.residual.new_empty(max(each.residual.numel() for each in matrices))
        M = torch.add(each.grad, each.residual, out=scratch[: each.grad.numel()].view(each.grad.shape))
        found.append(M @ each.Qt.t() if each.Qt is not None else each.P.t() @ M)  # pyright: ignore
    return found


def build_sum(each: Matrix) -> None:
    """Put M in the place of the residual, where no kernel builds it."""
    if not each.by_kernel:
        each.residual.add_(each.grad)


def undo_sum(each: Matrix) -> None:
    """The inverse of `build`, but for rounding: beside a huge gradient, what was owed is rounded to nothing."""
    if not each.by_kernel:
        each.residual.sub_(each.grad)


def project(each: Matrix, P: Tensor) -> Tensor:
    """Qᵀ = Pᵀ M of a matrix that is built."""
    return _left(each, P) if each.by_kernel else P.t() @ each.residual


def keep_remainder(each: Matrix, P: Tensor, Qt: Tensor) -> None:
    """What P Qᵀ leaves of M, which is built, becomes the residual."""
    if each.by_kernel:
        _outer(each.grad, each.residual, P, Qt, leaving=True)
    else:
        each.residual.addmm_(P, Qt, alpha=-1)


def decode(each: Matrix, P: Tensor, Qt: Tensor) -> None:
    """P Qᵀ becomes the gradient."""
    if each.by_kernel:
        _outer(each.grad, each.residual, P, Qt, leaving=False)
    elif each.grad.dtype == P.dtype:
        torch.mm(P, Qt, out=each.grad)
    else:
        each.grad.copy_(P @ Qt)


# -- by kernels -------------------------------------------------------------------------------------------------------


def _right(each: Matrix, Qt: Tensor) -> Tensor:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r = each.grad.shape, len(Qt)
    R = _power(r)
    at = WIDE if R >= _LEAST else Blocks(64 // R, 128, 4)  # 64 sums a thread
    blocks, steps, splits = _split(n, at.BN, m, at.BM)
    out = each.residual.new_empty(splits, n, r)
    inputs = (each.grad, each.residual, Qt.contiguous(), out, n, m, r)
    lowrank_kernel.right[blocks, splits](*inputs, STEPS=steps, R=R, **vars(at))  # pyright: ignore[reportIndexIssue]
    return out.sum(0) if splits > 1 else out[0]


def _left(each: Matrix, P: Tensor) -> Tensor:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r, R = each.grad.shape, P.shape[1], max(_LEAST, _power(P.shape[1]))
    blocks, steps, splits = _split(m, LEFT.BM, n, LEFT.BN)
    out = each.residual.new_empty(splits, r, m)
    inputs = (each.grad, each.residual, P.contiguous(), out, n, m, r)
    lowrank_kernel.left[blocks, splits](*inputs, STEPS=steps, R=R, **vars(LEFT))  # pyright: ignore[reportIndexIssue]
    return out.sum(0) if splits > 1 else out[0]


def _outer(grad: Tensor, residual: Tensor, P: Tensor, Qt: Tensor, *, leaving: bool) -> None:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r, R = grad.shape, len(Qt), max(_LEAST, _power(len(Qt)))
    blocks = -(-n // OUTER.BN) * -(-m // OUTER.BM)
    inputs = (grad, residual, P.contiguous(), Qt.contiguous(), n, m, r)
    lowrank_kernel.outer[blocks,](*inputs, LEAVE=leaving, R=R, **vars(OUTER))  # pyright: ignore[reportIndexIssue]


def _split(kept: int, block: int, summed: int, step: int) -> tuple[int, int, int]:
    """Blocks of the side that is kept; steps along the other that a program sums up; and how many programs do so."""
    blocks, steps = -(-kept // block), -(-summed // step)
    each = _power(-(-steps // max(1, PROGRAMS // blocks)))  # of which there are few: each is compiled
    return blocks, each, -(-steps // each)


def _power(least: int) -> int:
    """The power of 2 from there on."""
    return 1 << (least - 1).bit_length()
