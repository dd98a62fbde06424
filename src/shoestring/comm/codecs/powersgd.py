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
        """P = orth(mean(M Q)), Q = mean(Mᵀ P); the average is P Qᵀ."""
        P = multiply(batches)
        yield from average_tensors(P, whole, self.dtype)
        orthogonalise(P)
        for batch in batches:
            build_sum(batch)
        own = [project(batch, P_) for batch, P_ in zip(batches, P, strict=True)]
        mean = [Qt.clone() for Qt in own]
        try:
            yield from average_tensors(mean, [], self.dtype)
        except GeneratorExit:
            for batch in batches:
                undo_sum(batch)
            raise
        for batch, P_, own_, mean_ in zip(batches, P, own, mean, strict=True):
            keep_remainder(batch, P_, own_)
            decode(batch, P_, mean_)
            self.state["Qt"].update(zip(batch.names, mean_, strict=True))

    def _half(self, batches: list[MatrixBatch], whole: list[Tensor]) -> Coding:
        """P = mean(M Q) for an orthonormal Q from the step before; the average is P Qᵀ, and P is the next basis.

        At every other step Q = mean(Mᵀ P) for an orthonormal P, and Q is the next basis.
        """
        orthogonalise([batch.basis.mT if batch.right else batch.basis for batch in batches])
        own = multiply(batches)
        mean = [product.clone() for product in own]
        yield from average_tensors(mean, whole, self.dtype)
        for batch, own_, mean_ in zip(batches, own, mean, strict=True):
            build_sum(batch)
            keep_remainder(batch, *((own_, batch.basis) if batch.right else (batch.basis, own_)))
            decode(batch, *((mean_, batch.basis) if batch.right else (batch.basis, mean_)))
            kind, other = ("P", "Qt") if batch.right else ("Qt", "P")
            self.state[kind].update(zip(batch.names, mean_, strict=True))
            for name in batch.names:
                del self.state[other][name]

    def _pays(self, grad: Tensor) -> bool:
        if grad.ndim < 2 or not grad.numel():
            return False
        n = len(grad)
        m = grad.numel() // n
        return (n + m) * min(self.rank, n, m) * self.least < n * m

    def _matrix(self, name: str, grad: Tensor) -> Matrix:
        """A matrix with the basis from the step before; at first with a random basis, the same on all ranks."""
        if grad.ndim > 2:
            grad = grad.view(len(grad), -1)
        rank = min(self.rank, *grad.shape)
        residual = self.get_state("residual", name, grad).view(grad.shape)  # another codec's has the parameter's shape
        P, Qt = self.state.setdefault("P", {}), self.state.setdefault("Qt", {})
        if not self.alternate:  # of a run that did
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


def orthogonalise(stacks: Sequence[Tensor]) -> None:
    """Make the columns of each (n, r) matrix orthonormal, in place, of stacks (matrices, n, r).

    By Cholesky factorisation: for G = AᵀA = L Lᵀ, A L⁻ᵀ has orthonormal columns. It is in fp64, because G squares the
    condition number. A matrix of lower rank gets as many orthogonal columns as its rank, and small ones beyond.
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
