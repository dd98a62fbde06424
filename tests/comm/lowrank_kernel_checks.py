"""What the kernels of `lowrank` must do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

import os

import torch

from shoestring.comm.codecs import fused, lowrank
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.lowrank import Matrix, decode, keep_remainder, multiply, project
from shoestring.comm.codecs.powersgd import PowerSGDCodec


def drawn(n: int, m: int, rank: int, dtype: torch.dtype, device: str) -> tuple[Matrix, Matrix]:
    """A matrix with a basis for either side."""
    draw = torch.Generator().manual_seed(n * m + rank)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device)

    grad, residual = of(n, m).to(dtype), of(n, m)
    return Matrix("a", grad, residual, None, of(rank, m)), Matrix("a", grad, residual, of(n, rank), None)


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within what sums of some thousand terms leave in fp32 (3e-6; tf32: 3e-4), and one rounding to `dtype`."""
    error = float(torch.linalg.vector_norm(ours.double() - exact) / torch.linalg.vector_norm(exact))
    assert error < (1e-5 if dtype == torch.float32 else 4e-3), error
    assert ours.isfinite().all()


def assert_does_what_the_formulas_say(n: int, m: int, rank: int, dtype: torch.dtype, device: str) -> None:
    right, left = drawn(n, m, rank, dtype, device)
    assert right.by_kernel and left.by_kernel
    assert right.Qt is not None and left.P is not None
    M, P, Qt = right.grad.double() + right.residual.double(), left.P, right.Qt
    before = right.grad.clone(), right.residual.clone()
    own_right, own_left = multiply([right, left])
    close(own_right, M @ Qt.double().t())
    close(own_left, P.double().t() @ M)
    assert torch.equal(right.grad, before[0]) and torch.equal(right.residual, before[1])
    keep_remainder(right, P, Qt)
    close(right.residual, M - P.double() @ Qt.double())
    right.residual.copy_(before[1])
    basis = torch.linalg.qr(P)[0].t().contiguous().t()  # not contiguous, as a basis may be
    found = project(left, basis)
    close(found, basis.double().t() @ M)
    keep_remainder(left, basis, found)
    close(left.residual, M - basis.double() @ (basis.double().t() @ M))
    decode(left, P, Qt)
    close(left.grad, P.double() @ Qt.double(), dtype)


def assert_tells(device: str) -> None:
    """What is not finite reaches the product that travels first."""
    for value in (float("nan"), float("inf"), -float("inf")):
        for matrix in drawn(40, 200, 3, torch.float32, device):
            matrix.grad[39, 199] = value
            assert not multiply([matrix])[0].isfinite().all()
            matrix.grad[39, 199] = 0


def assert_the_codec_does_the_same(alternate: bool, device: str) -> None:
    """Over steps of two ranks, as by torch's operations: averages, residuals and bases."""
    kernels, found = fused.is_available, []
    for available in (kernels, lambda device: False):
        fused.is_available = available
        codecs, draw = (
            [PowerSGDCodec(3, alternate=alternate, least=1) for _ in range(2)],
            torch.Generator().manual_seed(1),
        )
        for step in range(4):
            grads = [{"a": torch.randn(90, 40, generator=draw).to(device)} for _ in codecs]
            run_lockstep(codecs, grads, step)
        found.append([grads[0]["a"], *(each["a"] for each in codecs[1].state.values() if each)])
    fused.is_available = kernels
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


SIZES = [(2, 1, 1), (32, 128, 4), (33, 129, 4), (700, 300, 5), (40, 3000, 20), (1500, 7, 1), (64, 90, 40)]


def main(device: str) -> None:
    usual = lowrank.PROGRAMS
    for lowrank.PROGRAMS in (2, usual):  # few programs take many steps each
        for n, m, rank in SIZES:
            assert_does_what_the_formulas_say(n, m, rank, torch.float32, device)
        assert_does_what_the_formulas_say(300, 500, 4, torch.bfloat16, device)
    assert_tells(device)
    for alternate in (False, True):
        assert_the_codec_does_the_same(alternate, device)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"]
    fused.is_available = lambda device: True
    main("cpu")
    print("as it must be")
