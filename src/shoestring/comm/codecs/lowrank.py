"""PowerSGD's operations on matrices M = g + e: products with a thin matrix, the remainder, and decoding.

On a CPU, M is built in scratch memory that fits the cache, or in place of the residual. On devices that Triton compiles
for, M is never written: 24 bytes are read or written for each entry of a bf16 gradient, instead of 46. All matrices of
one shape are in one launch, because launching one for each would take longer than the kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.comm.codecs import fused
from shoestring.comm.codecs.kernel_buckets import TYPES


@dataclass(frozen=True)
class Blocks:
    """Rows and columns that a program processes at a time, and its number of warps."""

    BN: int
    BM: int
    num_warps: int


LEFT, OUTER, WIDE = Blocks(32, 128, 4), Blocks(32, 128, 8), Blocks(32, 64, 4)  # the best of several on an H100
PROGRAMS = 2048  # number of programs of a launch that keeps a GPU busy
MOST = 64  # the largest rank whose program fits the 99 kB of shared memory of a GeForce
_SMALLEST = 16  # smallest side of a block's product


class Matrix(NamedTuple):
    """One parameter's gradient and residual, (n, m), and the basis from the step before."""

    name: str
    grad: Tensor
    residual: Tensor
    basis: Tensor  # Qᵀ (r, m) or P (n, r)
    right: bool  # whether it is Qᵀ


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape and type, with bases of one kind."""

    names: list[str]
    grads: list[Tensor]
    residuals: list[Tensor]
    basis: Tensor  # Qᵀ (matrices, r, m) or P (matrices, n, r), a copy
    right: bool
    table: Tensor | None  # addresses for a kernel; None: by torch's operations
    form: dict[str, Any]  # of the kernels: type and alignment

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> torch.Size:
        return self.grads[0].shape


def make_batches(matrices: Sequence[Matrix]) -> list[MatrixBatch]:
    """Batches in an order that depends on shapes, types and kinds of bases alone, which are equal on all ranks."""
    alike: dict[tuple[torch.Size, torch.dtype, bool], list[Matrix]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.grad.shape, matrix.grad.dtype, matrix.right), []).append(matrix)
    addresses = [_addresses(same) for same in alike.values()]
    flat, device = list(chain.from_iterable(addresses)), matrices[0].grad.device
    table = torch.tensor(flat, dtype=torch.int64, pin_memory=bool(flat) and device.type == "cuda")
    parts = table.to(device, non_blocking=True).view(-1, 2).split([len(own) // 2 for own in addresses])
    batches = []
    for same, own, part in zip(alike.values(), addresses, parts, strict=True):
        names, grads, residuals, bases, _ = map(list, zip(*same, strict=True))
        launched = (part, _form(grads[0].dtype, own)) if own else (None, {})
        batches.append(MatrixBatch(names, grads, residuals, torch.stack(bases), same[0].right, *launched))
    return batches


def multiply(batches: Sequence[MatrixBatch]) -> list[Tensor]:
    """M Q (matrices, n, r), or Pᵀ M (matrices, r, m), of each batch; gradients and residuals are unchanged."""
    scratch = None
    products = []
    for batch in batches:
        if batch.table is not None:
            products.append((_right if batch.right else _left)(batch, batch.table, batch.basis))
            continue
        if scratch is None:
            scratch = batch.basis.new_empty(max(other.shape.numel() for other in batches if other.table is None))
        M = scratch[: batch.shape.numel()].view(batch.shape)
        of_each = []
        for grad, residual, basis in zip(batch.grads, batch.residuals, batch.basis, strict=True):
            torch.add(grad, residual, out=M)
            of_each.append(M @ basis.t() if batch.right else basis.t() @ M)
        products.append(torch.stack(of_each))
    return products


def build_sum(batch: MatrixBatch) -> None:
    """Build M in place of the residual, unless a kernel adds both on the fly."""
    if batch.table is None:
        for grad, residual in zip(batch.grads, batch.residuals, strict=True):
            residual.add_(grad)


def undo_sum(batch: MatrixBatch) -> None:
    """The inverse of `build_sum`, up to rounding: a residual far smaller than the gradient is rounded to zero."""
    if batch.table is None:
        for grad, residual in zip(batch.grads, batch.residuals, strict=True):
            residual.sub_(grad)


def project(batch: MatrixBatch, P: Tensor) -> Tensor:
    """Qᵀ = Pᵀ M, after `build_sum`."""
    if batch.table is not None:
        return _left(batch, batch.table, P)
    return torch.stack([P_.t() @ residual for P_, residual in zip(P, batch.residuals, strict=True)])


def keep_remainder(batch: MatrixBatch, P: Tensor, Qt: Tensor) -> None:
    """Make M - P Qᵀ the residual, after `build_sum`."""
    if batch.table is not None:
        _outer(batch, batch.table, P, Qt, leaving=True)
        return
    for residual, P_, Qt_ in zip(batch.residuals, P, Qt, strict=True):
        residual.addmm_(P_, Qt_, alpha=-1)


def decode(batch: MatrixBatch, P: Tensor, Qt: Tensor) -> None:
    """Make P Qᵀ the gradient."""
    if batch.table is not None:
        _outer(batch, batch.table, P, Qt, leaving=False)
        return
    for grad, P_, Qt_ in zip(batch.grads, P, Qt, strict=True):
        if grad.dtype == P.dtype:
            torch.mm(P_, Qt_, out=grad)
        else:
            grad.copy_(P_ @ Qt_)


# -- by kernels -------------------------------------------------------------------------------------------------------


def _addresses(same: list[Matrix]) -> list[int]:
    """The addresses of each gradient and its residual; none where there is no kernel for these matrices."""
    grad, basis, right = same[0].grad, same[0].basis, same[0].right
    thin = basis.shape[0 if right else 1] <= MOST
    known = grad.dtype in TYPES and len(same) < 2**16  # as many as fit a grid's last axis
    if not (thin and known and fused.is_available(grad.device)):
        return []
    if not all(each.grad.is_contiguous() and each.residual.is_contiguous() for each in same):
        return []
    return [tensor.data_ptr() for each in same for tensor in (each.grad, each.residual)]


def _form(dtype: torch.dtype, addresses: list[int]) -> dict[str, Any]:
    import triton.language as tl

    aligned = all(address % 16 == 0 for address in addresses)
    return {"TYPE": (tl.float32, tl.bfloat16, tl.float16)[TYPES.index(dtype)], "ALIGNED": aligned}


def _right(batch: MatrixBatch, table: Tensor, Qt: Tensor) -> Tensor:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r = batch.shape, Qt.shape[1]
    R = _power(r)
    at = WIDE if R >= _SMALLEST else Blocks(64 // R, 128, 4)  # 64 sums a thread
    blocks, steps, splits = _split(n, at.BN, m, at.BM, len(batch))
    out = Qt.new_empty(len(batch), splits, n, r)
    inputs, launch = (table, Qt.contiguous(), out, n, m, r), lowrank_kernel.right[blocks, splits, len(batch)]
    launch(*inputs, STEPS=steps, R=R, **batch.form, **vars(at))
    return out.sum(1) if splits > 1 else out[:, 0]


def _left(batch: MatrixBatch, table: Tensor, P: Tensor) -> Tensor:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r, R = batch.shape, P.shape[2], max(_SMALLEST, _power(P.shape[2]))
    blocks, steps, splits = _split(m, LEFT.BM, n, LEFT.BN, len(batch))
    out = P.new_empty(len(batch), splits, r, m)
    inputs, launch = (table, P.contiguous(), out, n, m, r), lowrank_kernel.left[blocks, splits, len(batch)]
    launch(*inputs, STEPS=steps, R=R, **batch.form, **vars(LEFT))
    return out.sum(1) if splits > 1 else out[:, 0]


def _outer(batch: MatrixBatch, table: Tensor, P: Tensor, Qt: Tensor, *, leaving: bool) -> None:
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r = batch.shape, Qt.shape[1]
    grid = (-(-n // OUTER.BN) * -(-m // OUTER.BM), 1, len(batch))
    inputs, R = (table, P.contiguous(), Qt.contiguous(), n, m, r), max(_SMALLEST, _power(r))
    lowrank_kernel.outer[grid](*inputs, LEAVE=leaving, R=R, **batch.form, **vars(OUTER))


def _split(kept: int, block: int, summed: int, step: int, matrices: int) -> tuple[int, int, int]:
    """Blocks of the side that is kept; steps of a program along the other side; programs along that side."""
    blocks, steps = -(-kept // block), -(-summed // step)
    # few different numbers of steps, because each is compiled
    steps_each = _power(-(-steps // max(1, PROGRAMS // (blocks * matrices))))
    return blocks, steps_each, -(-steps // steps_each)


def _power(least: int) -> int:
    """The smallest power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()
