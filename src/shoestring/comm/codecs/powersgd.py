"""PowerSGD: low-rank gradients by one power iteration a step (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

A matrix M = g + e of n x m travels as P (n x r) and Qᵀ (r x m). It departs from the paper in two ways:

- The residual is e = M - P (Mᵀ P)ᵀ, the remainder of this rank's own projection rather than of the average. Its mean
  over the ranks is the same, but it does not contain M - mean(M), which would be a random walk that cancels only while
  no rank is lost.
- With `alternate` each step computes half of the iteration, P and Q in turn: half the bytes and one round trip instead
  of two, with a basis that is one step old. The authors' later package (epfml/powersgd) does the same.

A step is memory-bound: it reads memory six times (`lowrank`). Q is stored transposed, so that both products run along
rows. With Q as (m, r) they take three to four times as long on a CPU.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads, Mean
from shoestring.comm.codecs.dense import flatten, unflatten
from shoestring.comm.codecs.lowrank import Matrix, build_sum, decode, keep_remainder, multiply, project, undo_sum

RELATIVE_JITTER = 1e-12  # relative to the trace: keeps the factorisation defined for matrices of lower rank


class PowerSGDCodec(Codec):
    """Gradients of rank `rank`; vectors, and matrices that would shrink by less than `least`, are not compressed.

    State: "residual", and the newest factor of each matrix, either "Qt" (r, m) or "P" (n, r).

    Args:
        dtype: data type of P and Q on the wire.
        least: smallest compression ratio for which a matrix is compressed.
        start: steps at the beginning that compress nothing.
    """

    shared = frozenset({"Qt", "P"})

    def __init__(
        self,
        rank: int,
        *,
        alternate: bool = False,
        dtype: torch.dtype = torch.float32,
        least: float = 2.0,
        start: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.rank, self.alternate, self.dtype, self.least, self.seed = rank, alternate, dtype, least, seed
        self.start = start
        self.stages = 1 if alternate else 2

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        paying = [name for name, grad in grads.items() if context.step >= self.start and self._pays(grad)]
        low = {name: grads[name].view(len(grads[name]), -1) for name in paying}
        whole = [grad for name, grad in grads.items() if name not in low]
        matrices = [self._matrix(name, grad) for name, grad in low.items()]
        if not matrices:
            yield from average_tensors([], whole)
        elif self.alternate:
            yield from self._half(matrices, whole)
        else:
            yield from self._iteration(matrices, whole)

    def _iteration(self, matrices: list[Matrix], whole: list[Tensor]) -> Coding:
        """P = orth(mean(M Q)), Q = mean(Mᵀ P); the average is P Qᵀ."""
        P = multiply(matrices)
        yield from average_tensors(P, whole, self.dtype)
        orthogonalise(P)
        for matrix in matrices:
            build_sum(matrix)
        own = [project(matrix, P_) for matrix, P_ in zip(matrices, P, strict=True)]
        mean = [Qt.clone() for Qt in own]
        try:
            yield from average_tensors(mean, [], self.dtype)
        except GeneratorExit:
            for matrix in matrices:
                undo_sum(matrix)
            raise
        for matrix, P_, own_, mean_ in zip(matrices, P, own, mean, strict=True):
            keep_remainder(matrix, P_, own_)
            decode(matrix, P_, mean_)
            self.state["Qt"][matrix.name] = mean_

    def _half(self, matrices: list[Matrix], whole: list[Tensor]) -> Coding:
        """P = mean(M Q) for an orthonormal Q from the step before; the average is P Qᵀ, and P is the next basis.

        At every other step Q = mean(Mᵀ P) for an orthonormal P, and Q is the next basis.
        """
        matrices = _orthonormalise_bases(matrices)
        own = multiply(matrices)
        mean = [product.clone() for product in own]
        yield from average_tensors(mean, whole, self.dtype)
        for matrix, own_, mean_ in zip(matrices, own, mean, strict=True):
            P, Qt, kind, other = (own_, matrix.Qt, "P", "Qt") if matrix.P is None else (matrix.P, own_, "Qt", "P")
            assert P is not None and Qt is not None
            build_sum(matrix)
            keep_remainder(matrix, P, Qt)
            decode(matrix, *((mean_, Qt) if matrix.P is None else (P, mean_)))
            del self.state[other][matrix.name]
            self.state[kind][matrix.name] = mean_

    def _pays(self, grad: Tensor) -> bool:
        if grad.ndim < 2 or not grad.numel():
            return False
        n, m = len(grad), grad[0].numel()
        return (n + m) * min(self.rank, n, m) * self.least < n * m

    def _matrix(self, name: str, grad: Tensor) -> Matrix:
        """A matrix with the basis from the step before; at first with a random basis, the same on all ranks."""
        rank, residual = min(self.rank, *grad.shape), self.get_state("residual", name, grad)
        P, Qt = self.state.setdefault("P", {}), self.state.setdefault("Qt", {})
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
        if name not in P and name not in Qt:
            Qt[name] = torch.randn(rank, grad.shape[1], generator=generator).to(grad.device)
        if name in P:
            return Matrix(name, grad, residual, resize_basis(P[name].t(), rank, generator).t(), None)
        return Matrix(name, grad, residual, None, resize_basis(Qt[name], rank, generator))


def resize_basis(basis: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Give a basis (r, m) `rank` rows, for a run resumed with another rank: the first rows, or all and random ones of
    about the same length."""
    r, m = basis.shape
    if r >= rank:
        return basis[:rank]
    drawn = torch.randn(rank - r, m, generator=generator).to(basis.device)
    return torch.cat([basis, drawn * (torch.linalg.vector_norm(basis) / (r * m) ** 0.5)])


def average_tensors(factors: list[Tensor], whole: list[Tensor], dtype: torch.dtype = torch.float32) -> Coding:
    """Replace factors, which travel as `dtype`, and uncompressed gradients by their means over the ranks."""
    groups = [(tensors, kind) for tensors, kind in ((factors, dtype), (whole, torch.float32)) if tensors]
    answers = yield [Mean(flatten(tensors, kind)) for tensors, kind in groups]
    for answer, (tensors, _) in zip(answers, groups, strict=True):
        unflatten(answer, tensors)


def _orthonormalise_bases(matrices: list[Matrix]) -> list[Matrix]:
    """The matrices with orthonormal bases, which are copies."""
    copies = [
        replace(
            matrix,
            P=None if matrix.P is None else matrix.P.clone(),
            Qt=None if matrix.Qt is None else matrix.Qt.clone(),
        )
        for matrix in matrices
    ]
    bases = [(matrix.P, None if matrix.Qt is None else matrix.Qt.t()) for matrix in copies]
    orthogonalise([basis for pair in bases for basis in pair if basis is not None])
    return copies


def orthogonalise(matrices: list[Tensor]) -> None:
    """Make the columns of each (n, r) matrix orthonormal, in place; all matrices of one shape at once.

    By Cholesky factorisation: for G = AᵀA = L Lᵀ, A L⁻ᵀ has orthonormal columns. It is in fp64, because G squares the
    condition number. A matrix of lower rank gets as many orthogonal columns as its rank, and small ones beyond.
    """
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        shapes.setdefault(matrix.shape, []).append(matrix)
    for same_shape in shapes.values():
        A = torch.stack(same_shape).double()
        G = A.mT @ A
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        G += torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) * (RELATIVE_JITTER * trace + 1e-200)
        L = torch.linalg.cholesky_ex(G)[0]
        solved = torch.linalg.solve_triangular(L, A.mT, upper=False).mT
        foreach_copy_(same_shape, list(solved))
