"""PowerSGD's operations on matrices M = g + e (gradient + residual): products with a thin matrix, new residuals,
decoding.

On a CPU, M is built in scratch memory, or in place of the residual. On devices with Triton, M is never written: the
memory traffic is 24 bytes per entry of a bf16 gradient, instead of 46. One launch handles all matrices of one shape,
because a launch per matrix would take longer than the kernels.
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
    """Rows (BN) and columns (BM) that a program processes at a time, and the program's number of warps."""

    BN: int
    BM: int
    num_warps: int


LEFT, OUTER, WIDE = Blocks(32, 128, 4), Blocks(32, 128, 8), Blocks(32, 64, 4)  # the fastest of several sizes on an H100
PROGRAMS = 2048  # number of programs that keeps a GPU busy
MOST = 64  # maximum rank at which a program fits the 99 kB of shared memory of a GeForce
_SMALLEST = 16  # smallest side of a block that tl.dot supports


class Matrix(NamedTuple):
    """One parameter's gradient and residual, (n, m), and the basis from the previous step."""

    name: str
    grad: Tensor
    residual: Tensor
    basis: Tensor  # Qᵀ (r, m) or P (n, r)
    right: bool  # whether the basis is Qᵀ, which multiplies M from the right


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape and type, with bases of one kind."""

    names: list[str]
    grads: list[Tensor]
    residuals: list[Tensor]
    basis: Tensor  # Qᵀ (matrices, r, m) or P (matrices, n, r), a copy
    right: bool
    table: Tensor | None  # addresses for the kernels; None if torch's operations are used instead
    form: dict[str, Any]  # constants of the kernels: type and alignment

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> torch.Size:
        return self.grads[0].shape


def make_batches(matrices: Sequence[Matrix]) -> list[MatrixBatch]:
    """Group matrices by shape, type and kind of basis. The order of the batches is the same on all ranks."""
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
    """Multiply M by the basis: M Q (matrices, n, r) or Pᵀ M (matrices, r, m) for each batch. Gradients and residuals
    are not changed."""
    scratch = None
    products = []
    for batch in batches:
        if batch.table is not None:
            products.append((_right if batch.right else _left)(batch, batch.table, batch.basis))
            continue
        if scratch is None:
            scratch = batch.basis.new_empty(max(batch.shape.numel() for batch in batches if batch.table is None))
        M = scratch[: batch.shape.numel()].view(batch.shape)
        stack = []
        for grad, residual, basis in zip(batch.grads, batch.residuals, batch.basis, strict=True):
            torch.add(grad, residual, out=M)
            stack.append(M @ basis.t() if batch.right else basis.t() @ M)
        products.append(torch.stack(stack))
    return products


def build_sum(batch: MatrixBatch) -> None:
    """Write M in place of the residual, except where kernels add gradient and residual on the fly."""
    if batch.table is None:
        for grad, residual in zip(batch.grads, batch.residuals, strict=True):
            residual.add_(grad)


def undo_sum(batch: MatrixBatch) -> None:
    """The inverse of `build_sum`, up to rounding: a residual far smaller than the gradient is rounded to zero."""
    if batch.table is None:
        for grad, residual in zip(batch.grads, batch.residuals, strict=True):
            residual.sub_(grad)


def project(batch: MatrixBatch, P: Tensor) -> Tensor:
    """Compute Qᵀ = Pᵀ M; to be called after `build_sum`."""
    if batch.table is not None:
        return _left(batch, batch.table, P)
    return torch.stack([P_.t() @ residual for P_, residual in zip(P, batch.residuals, strict=True)])


def keep_remainder(batch: MatrixBatch, P: Tensor, Qt: Tensor) -> None:
    """Set the residual to M - P Qᵀ; to be called after `build_sum`."""
    if batch.table is not None:
        _outer(batch, batch.table, P, Qt, leaving=True)
        return
    for residual, P_, Qt_ in zip(batch.residuals, P, Qt, strict=True):
        residual.addmm_(P_, Qt_, alpha=-1)


def decode(batch: MatrixBatch, P: Tensor, Qt: Tensor) -> None:
    """Set the gradient to P Qᵀ."""
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
    """The addresses of each gradient and its residual; empty if the kernels do not support these matrices."""
    grad, basis, right = same[0].grad, same[0].basis, same[0].right
    thin = basis.shape[0 if right else 1] <= MOST
    known = grad.dtype in TYPES and len(same) < 2**16  # the limit of a grid's last axis
    if not (thin and known and fused.is_available(grad.device)):
        return []
    if not all(matrix.grad.is_contiguous() and matrix.residual.is_contiguous() for matrix in same):
        return []
    return [tensor.data_ptr() for matrix in same for tensor in (matrix.grad, matrix.residual)]


def _form(dtype: torch.dtype, addresses: list[int]) -> dict[str, Any]:
    """Constants of the kernels: data type, and whether all addresses are aligned to 16 bytes."""
    import triton.language as tl

    aligned = all(address % 16 == 0 for address in addresses)
    return {"TYPE": (tl.float32, tl.bfloat16, tl.float16)[TYPES.index(dtype)], "ALIGNED": aligned}


def _right(batch: MatrixBatch, table: Tensor, Qt: Tensor) -> Tensor:
    """Compute M Q (matrices, n, r) by a kernel."""
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r = batch.shape, Qt.shape[1]
    R = _power(r)
    at = WIDE if R >= _SMALLEST else Blocks(64 // R, 128, 4)  # a thread holds 64 sums
    blocks, steps, splits = _split(n, at.BN, m, at.BM, len(batch))
    out = Qt.new_empty(len(batch), splits, n, r)
    inputs, launch = (table, Qt.contiguous(), out, n, m, r), lowrank_kernel.right[blocks, splits, len(batch)]
    launch(*inputs, STEPS=steps, R=R, **batch.form, **vars(at))
    return out.sum(1) if splits > 1 else out[:, 0]


def _left(batch: MatrixBatch, table: Tensor, P: Tensor) -> Tensor:
    """Compute Pᵀ M (matrices, r, m) by a kernel."""
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r, R = batch.shape, P.shape[2], max(_SMALLEST, _power(P.shape[2]))
    blocks, steps, splits = _split(m, LEFT.BM, n, LEFT.BN, len(batch))
    out = P.new_empty(len(batch), splits, r, m)
    inputs, launch = (table, P.contiguous(), out, n, m, r), lowrank_kernel.left[blocks, splits, len(batch)]
    launch(*inputs, STEPS=steps, R=R, **batch.form, **vars(LEFT))
    return out.sum(1) if splits > 1 else out[:, 0]


def _outer(batch: MatrixBatch, table: Tensor, P: Tensor, Qt: Tensor, *, leaving: bool) -> None:
    """Write M - P Qᵀ into the residuals if `leaving`, else P Qᵀ into the gradients."""
    from shoestring.comm.codecs import lowrank_kernel

    (n, m), r = batch.shape, Qt.shape[1]
    grid = (-(-n // OUTER.BN) * -(-m // OUTER.BM), 1, len(batch))
    inputs, R = (table, P.contiguous(), Qt.contiguous(), n, m, r), max(_SMALLEST, _power(r))
    lowrank_kernel.outer[grid](*inputs, LEAVE=leaving, R=R, **batch.form, **vars(OUTER))


def _split(output: int, block: int, summed: int, step: int, matrices: int) -> tuple[int, int, int]:
    """Divide a product among programs. Returns three numbers: blocks along the output dimension, and, along the summed
    dimension, steps per program and programs."""
    blocks, steps = -(-output // block), -(-summed // step)
    # The number of steps is a power of 2, because the kernel is compiled anew for each number of steps.
    steps_each = _power(-(-steps // max(1, PROGRAMS // (blocks * matrices))))
    return blocks, steps_each, -(-steps // steps_each)


def _power(least: int) -> int:
    """The smallest power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()
