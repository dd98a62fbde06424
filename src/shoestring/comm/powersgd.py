"""PowerSGD: low-rank gradients by one power iteration a step (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

A matrix M = g + e of n x m travels as P (n x r) and Q (m x r). It departs from the paper in two ways:

- The residual is e = M - P (Mᵀ P)ᵀ, what this rank's own projection leaves, not what the average leaves. Its mean over
  the ranks is the same, but it does not hold M - mean(M), which walks randomly and cancels only while all ranks live.
- `alternate` makes one half of the iteration a step, P and Q in turn: half the bytes and one exchange instead of two,
  with a basis that is one step old. So does the authors' later package (epfml/powersgd).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.comm.codec import Codec, Coding, Grads, Mean, Turn
from shoestring.comm.dense import flattened, spread
from shoestring.core._torch import foreach_copy_

RELATIVE_JITTER = 1e-12  # of the trace: keeps the factorisation defined for matrices of lower rank


@dataclass(frozen=True)
class Matrix:
    """One parameter's gradient and residual as (n, m) matrices; transposed where the left factor is the basis."""

    name: str
    grad: Tensor
    residual: Tensor
    basis: Tensor  # (m, r), of the step before
    transposed: bool = False


class PowerSGD(Codec):
    """Gradients of rank `rank`; vectors, and matrices for which that would save less than `least`, travel whole.

    State: "residual"; and of each matrix its newest factor, either "Q" (m x r) or "P" (n x r).

    Args:
        dtype: of P and Q on the wire.
        least: the least ratio of sizes for which a matrix is compressed.
    """

    shared = frozenset({"Q", "P"})

    def __init__(
        self,
        rank: int,
        *,
        alternate: bool = False,
        dtype: torch.dtype = torch.float32,
        least: float = 2.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.rank, self.alternate, self.dtype, self.least, self.seed = rank, alternate, dtype, least, seed

    @property
    def stages(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 if self.alternate else 2

    def code(self, grads: Grads, turn: Turn) -> Coding:
        low = {name: grad.view(len(grad), -1) for name, grad in grads.items() if self._pays(grad)}
        whole = [grad for name, grad in grads.items() if name not in low]
        matrices = [self._matrix(name, grad) for name, grad in low.items()]
        if not matrices:
            yield from averaged([], whole)
        elif self.alternate:
            yield from self._half(matrices, whole)
        else:
            yield from self._iteration(matrices, whole)

    def _iteration(self, matrices: list[Matrix], whole: list[Tensor]) -> Coding:
        """P = orth(mean(M Q)), Q = mean(Mᵀ P); the average is P Qᵀ."""
        scratch, rows, columns = _scratch(matrices), [len(each.grad) for each in matrices], _columns(matrices)
        P = _factors(matrices, rows)
        for each, P_ in zip(matrices, P, strict=True):
            torch.mm(_sum(each, scratch), each.basis, out=P_)
        yield from averaged(P, whole, self.dtype)
        orthogonalise(P)
        Q = _factors(matrices, columns)
        for each, P_, Q_ in zip(matrices, P, Q, strict=True):
            M = _sum(each, scratch)
            torch.mm(M.t(), P_, out=Q_)
            torch.addmm(M, P_, Q_.t(), alpha=-1, out=each.residual)
        yield from averaged(Q, [], self.dtype)
        for each, P_, Q_ in zip(matrices, P, Q, strict=True):
            _decode(each, P_, Q_)
            self.state["Q"][each.name] = Q_

    def _half(self, matrices: list[Matrix], whole: list[Tensor]) -> Coding:
        """P = mean(M Q) for an orthonormal Q from the step before; the average is P Qᵀ, and P the next basis."""
        scratch, Q = _scratch(matrices), [each.basis.clone() for each in matrices]
        orthogonalise(Q)
        own = _factors(matrices, [len(each.grad) for each in matrices])
        for each, P_, Q_ in zip(matrices, own, Q, strict=True):
            torch.mm(_sum(each, scratch), Q_, out=P_)
        P = [P_.clone() for P_ in own]
        yield from averaged(P, whole, self.dtype)
        for each, own_, P_, Q_ in zip(matrices, own, P, Q, strict=True):
            torch.addmm(_sum(each, scratch), own_, Q_.t(), alpha=-1, out=each.residual)
            _decode(each, P_, Q_)
            old, new = ("P", "Q") if each.transposed else ("Q", "P")
            del self.state[old][each.name]
            self.state[new][each.name] = P_

    def _pays(self, grad: Tensor) -> bool:
        if grad.ndim < 2 or not grad.numel():
            return False
        n, m = len(grad), grad[0].numel()
        return (n + m) * min(self.rank, n, m) * self.least < n * m

    def _matrix(self, name: str, grad: Tensor) -> Matrix:
        """With the basis that the step before left; at first one that is drawn, equally on all ranks."""
        n, m = grad.shape
        residual = self.kept("residual", name, grad)
        P, Q = self.state.setdefault("P", {}), self.state.setdefault("Q", {})
        if name in P:
            return Matrix(name, grad.t(), residual.t(), P[name], transposed=True)
        if name not in Q:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
            Q[name] = torch.randn(m, min(self.rank, n, m), generator=generator).to(grad.device)
        return Matrix(name, grad, residual, Q[name])


def averaged(factors: list[Tensor], whole: list[Tensor], dtype: torch.dtype = torch.float32) -> Coding:
    """Replace the factors, which travel as `dtype`, and the gradients that travel whole by their means over ranks."""
    groups = [(tensors, kind) for tensors, kind in ((factors, dtype), (whole, torch.float32)) if tensors]
    answers = yield [Mean(flattened(tensors, kind)) for tensors, kind in groups]
    for answer, (tensors, _) in zip(answers, groups, strict=True):
        spread(answer, tensors)


def _columns(matrices: list[Matrix]) -> list[int]:
    return [each.grad.shape[1] for each in matrices]


def _factors(matrices: list[Matrix], lengths: list[int]) -> list[Tensor]:
    """Room for one (length, r) factor of each matrix."""
    return [each.basis.new_empty(length, each.basis.shape[1]) for each, length in zip(matrices, lengths, strict=True)]


def _scratch(matrices: list[Matrix]) -> Tensor:
    """Room for the largest M: one matrix at a time stays in the cache between the products that it enters."""
    return matrices[0].residual.new_empty(max(each.residual.numel() for each in matrices))


def _sum(matrix: Matrix, scratch: Tensor) -> Tensor:
    """M = g + e in `scratch`, laid out as they are."""
    M = scratch[: matrix.grad.numel()].view(matrix.grad.t().shape if matrix.transposed else matrix.grad.shape)
    return torch.add(matrix.grad, matrix.residual, out=M.t() if matrix.transposed else M)


def _decode(matrix: Matrix, P: Tensor, Q: Tensor) -> None:
    if matrix.grad.dtype == P.dtype:
        torch.mm(P, Q.t(), out=matrix.grad)
    else:
        matrix.grad.copy_(P @ Q.t())


def orthogonalise(matrices: list[Tensor]) -> None:
    """Make the columns of each (n, r) matrix orthonormal, in place; all of one shape at once.

    By Cholesky: for G = AᵀA = L Lᵀ, A L⁻ᵀ has orthonormal columns. In fp64, for G squares the condition number. A
    matrix of lower rank, or zero, gets columns that are orthogonal as far as its rank goes, and small beyond.
    """
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        shapes.setdefault(matrix.shape, []).append(matrix)
    for alike in shapes.values():
        A = torch.stack(alike).double()
        G = A.mT @ A
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        G += torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) * (RELATIVE_JITTER * trace + 1e-200)
        L = torch.linalg.cholesky_ex(G)[0]
        solved = torch.linalg.solve_triangular(L, A.mT, upper=False).mT
        foreach_copy_(alike, list(solved))
