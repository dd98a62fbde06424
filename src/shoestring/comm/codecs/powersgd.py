"""PowerSGD: low-rank gradients by one power iteration per step (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

A matrix M = g + e (n x m), gradient plus residual, is sent as P (n x r) and Qᵀ (r x m). This implementation departs
from the paper in two ways:

- The residual is e = M - P (Mᵀ P)ᵀ, the error of this rank's own projection, not the error of the average. The mean
  residual over ranks is the same as in the paper, but a rank's residual does not contain M - mean(M). The term M -
  mean(M) would be a random walk, and would cancel out over ranks only while no rank is lost.
- With `alternate`, a step computes only P or only Q, in turn. Alternating halves the bytes and needs one round trip
  instead of two, but the basis is one step old. The authors' later package (epfml/powersgd) alternates too.

A step is bandwidth-bound: it passes over memory six times (see `lowrank`). Q is stored transposed, so that both
products read along rows. On a CPU the products take three to four times as long if Q is stored as (m, r).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads, Mean
from shoestring.comm.codecs.dense import flatten, unflatten
from shoestring.comm.codecs.lowrank import (
    Matrix,
    MatrixBatch,
    build_sum,
    decode,
    keep_remainder,
    make_batches,
    multiply,
    project,
    undo_sum,
)

RELATIVE_JITTER = 1e-12  # added to the diagonal, relative to the trace; allows rank-deficient matrices


class PowerSGDCodec(Codec):
    """Approximates gradients by matrices of rank `rank`. Vectors, and matrices that would shrink by less than the
    factor `least`, are not compressed.

    State: "residual", and the newest factor of each matrix, either "Qt" (r, m) or "P" (n, r).

    Args:
        dtype: data type of P and Q on the wire.
        least: smallest compression ratio for which a matrix is compressed.
        start: number of steps at the beginning that do not compress.
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
        low = {name: grad for name, grad in grads.items() if context.step >= self.start and self._pays(grad)}
        whole = [grad for name, grad in grads.items() if name not in low]
        if not low:
            yield from average_tensors([], whole)
            return
        batches = make_batches([self._matrix(name, grad) for name, grad in low.items()])
        if self.alternate:
            yield from self._half(batches, whole)
        else:
            yield from self._iteration(batches, whole)

    def _iteration(self, batches: list[MatrixBatch], whole: list[Tensor]) -> Coding:
        """A full iteration: P = orth(mean(M Q)), Q = mean(Mᵀ P); the average is P Qᵀ."""
        P = multiply(batches)
        yield from average_tensors(P, whole, self.dtype)
        orthogonalise(P)
        for batch in batches:
            build_sum(batch)
        own = [project(batch, P_) for batch, P_ in zip(batches, P, strict=True)]
        mean = [Qt.clone() for Qt in own]  # `own` is needed for this rank's residual
        try:
            yield from average_tensors(mean, [], self.dtype)
        except GeneratorExit:  # raised if a result is too large to decode
            for batch in batches:
                undo_sum(batch)
            raise
        for batch, P_, own_, mean_ in zip(batches, P, own, mean, strict=True):
            keep_remainder(batch, P_, own_)
            decode(batch, P_, mean_)
            self.state["Qt"].update(zip(batch.names, mean_, strict=True))

    def _half(self, batches: list[MatrixBatch], whole: list[Tensor]) -> Coding:
        """Half an iteration: P = mean(M Q) for an orthonormal Q from the previous step; the average is P Qᵀ, and P is
        the next basis.

        Every other step computes Q = mean(Mᵀ P) for an orthonormal P, and Q is the next basis.
        """
        orthogonalise([batch.basis.mT if batch.right else batch.basis for batch in batches])
        own = multiply(batches)
        mean = [product.clone() for product in own]
        yield from average_tensors(mean, whole, self.dtype)
        for batch, own_, mean_ in zip(batches, own, mean, strict=True):
            build_sum(batch)
            keep_remainder(batch, *((own_, batch.basis) if batch.right else (batch.basis, own_)))
            decode(batch, *((mean_, batch.basis) if batch.right else (batch.basis, mean_)))
            kind, former = ("P", "Qt") if batch.right else ("Qt", "P")
            self.state[kind].update(zip(batch.names, mean_, strict=True))
            for name in batch.names:
                del self.state[former][name]

    def _pays(self, grad: Tensor) -> bool:
        """Whether the two factors have fewer entries than the gradient by more than the factor `least`."""
        if grad.ndim < 2 or not grad.numel():
            return False
        n = len(grad)
        m = grad.numel() // n
        return (n + m) * min(self.rank, n, m) * self.least < n * m

    def _matrix(self, name: str, grad: Tensor) -> Matrix:
        """Return a matrix with the basis from the previous step; in the first step, the basis is random, but the same
        on all ranks."""
        if grad.ndim > 2:
            grad = grad.view(len(grad), -1)
        rank = min(self.rank, *grad.shape)
        # A residual saved by another codec has the parameter's shape.
        residual = self.get_state("residual", name, grad).view(grad.shape)
        P, Qt = self.state.setdefault("P", {}), self.state.setdefault("Qt", {})
        if not self.alternate:  # P may have been saved by a run with `alternate`
            P.pop(name, None)
        if name not in P and name not in Qt:
            Qt[name] = torch.randn(rank, grad.shape[1], generator=self._generator(name)).to(grad.device)
        right = name not in P
        basis = (Qt if right else P)[name].to(grad.device)
        if basis.shape[0 if right else 1] != rank:
            generator = self._generator(name)
            basis = resize_basis(basis, rank, generator) if right else resize_basis(basis.t(), rank, generator).t()
        return Matrix(name, grad, residual, basis, right)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))


def resize_basis(basis: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Change a basis (r, m) to `rank` rows, for a run resumed with another rank of the approximation.

    The result has the first rows of the basis, or all its rows followed by random rows of about the same norm.
    """
    r, m = basis.shape
    if r >= rank:
        return basis[:rank]
    drawn = torch.randn(rank - r, m, generator=generator).to(basis.device)
    return torch.cat([basis, drawn * (torch.linalg.vector_norm(basis) / (r * m) ** 0.5)])


def average_tensors(factors: list[Tensor], whole: list[Tensor], dtype: torch.dtype = torch.float32) -> Coding:
    """Average factors (sent as `dtype`) and uncompressed gradients (sent as fp32) over ranks, in place."""
    groups = [(tensors, kind) for tensors, kind in ((factors, dtype), (whole, torch.float32)) if tensors]
    answers = yield [Mean(flatten(tensors, kind)) for tensors, kind in groups]
    for answer, (tensors, _) in zip(answers, groups, strict=True):
        unflatten(answer, tensors)


def orthogonalise(stacks: Sequence[Tensor]) -> None:
    """Orthonormalise, in place, the columns of each matrix in stacks (matrices, n, r).

    This uses the Cholesky factorisation: for G = AᵀA = L Lᵀ, A L⁻ᵀ has orthonormal columns. The factorisation runs in
    fp64, because G squares the condition number. A matrix of rank k < r gets k orthonormal columns; its other columns
    are small.
    """
    ranks: dict[int, list[Tensor]] = {}
    for stack in stacks:
        ranks.setdefault(stack.shape[-1], []).append(stack)
    for same_rank in ranks.values():
        As = [stack.double() for stack in same_rank]
        G = torch.cat([A.mT @ A for A in As])
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        G += torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) * (RELATIVE_JITTER * trace + 1e-200)
        Ls = torch.linalg.cholesky_ex(G)[0].split([len(A) for A in As])
        for stack, A, L in zip(same_rank, As, Ls, strict=True):
            stack.copy_(torch.linalg.solve_triangular(L, A.mT, upper=False).mT)
