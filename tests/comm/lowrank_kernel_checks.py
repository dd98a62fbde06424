"""What the kernels of `lowrank` must do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

import os

import torch

from shoestring.comm.codecs import fused, lowrank
from shoestring.comm.codecs.kernel_buckets import TYPES
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.lowrank import MOST, Matrix, decode, keep_remainder, make_batches, multiply, project
from shoestring.comm.codecs.powersgd import PowerSGDCodec


def drawn(
    sizes: list[tuple[int, int]], rank: int, dtype: torch.dtype, device: str, of_each: int = 2, shift: int = 0
) -> list[Matrix]:
    """Matrices of some sizes with bases of either kind, whose entries begin `shift` entries behind an aligned place."""
    draw = torch.Generator().manual_seed(rank)

    def of(n: int, m: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        place = torch.empty(shift + n * m, dtype=kind, device=device)[shift:].view(n, m)
        return place.copy_(torch.randn(n, m, generator=draw))

    matrices = []
    for number in range(of_each):
        for n, m in sizes:
            for right in (True, False):
                basis = of(rank, m) if right else of(rank, n).t()  # not contiguous, as a basis may be
                matrices.append(Matrix(f"{n}x{m} {right} {number}", of(n, m, dtype), of(n, m), basis, right))
    return matrices


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within what sums of some thousand terms leave in fp32 (3e-6; tf32: 3e-4), and one rounding to `dtype`."""
    error = float(torch.linalg.vector_norm(ours.double() - exact) / torch.linalg.vector_norm(exact))
    assert error < (1e-5 if dtype == torch.float32 else 4e-3), error
    assert ours.isfinite().all()


def results(matrices: list[Matrix]) -> dict[str, list[torch.Tensor]]:
    """Of each matrix: the product, P and Qᵀ, Pᵀ M, the remainder M - P Qᵀ, the gradient 2 P Qᵀ."""
    found = {}
    batches = make_batches(matrices)
    before = [(matrix.grad.clone(), matrix.residual.clone()) for matrix in matrices]
    products = multiply(batches)
    for matrix, (grad, residual) in zip(matrices, before, strict=True):
        assert torch.equal(matrix.grad, grad)
        assert torch.equal(matrix.residual, residual)
    for batch, product in zip(batches, products, strict=True):
        n, m = batch.shape
        assert batch.table is not None
        assert product.is_contiguous()
        P, Qt = (product / m, batch.basis) if batch.right else (batch.basis, product / n)
        projected = project(batch, P)
        keep_remainder(batch, P, Qt)
        decode(batch, P, 2 * Qt)
        parts = (product, P, Qt, projected, batch.residuals, batch.grads)
        found |= {name: [part[number].clone() for part in parts] for number, name in enumerate(batch.names)}
    return found


def assert_does_what_the_formulas_say(
    sizes: list[tuple[int, int]], rank: int, dtype: torch.dtype, device: str, of_each: int = 1, shift: int = 0
) -> None:
    matrices = drawn(sizes, rank, dtype, device, of_each, shift)
    Ms = [matrix.grad.double() + matrix.residual.double() for matrix in matrices]
    found = results(matrices)
    for matrix, M in zip(matrices, Ms, strict=True):
        product, P, Qt, projected, remainder, average = found[matrix.name]
        basis = matrix.basis.double()
        close(product, M @ basis.t() if matrix.right else basis.t() @ M)
        close(projected, P.double().t() @ M)
        close(remainder, M - P.double() @ Qt.double())
        close(average, 2 * P.double() @ Qt.double(), dtype)


def assert_many_are_as_one(device: str) -> None:
    """Matrices of one shape in a launch and each in its own, bit by bit, where programs do as many steps."""
    sizes, usual = [(40, 150), (150, 40)], lowrank.PROGRAMS
    some = 6 if device == "cpu" else 1  # a GPU may add partial sums up in another order where there are more of them
    for programs, rank, dtype in ((1, 4, torch.float16), (some, 20, torch.bfloat16)):
        lowrank.PROGRAMS = programs
        alone: dict[str, list[torch.Tensor]] = {}
        for matrix in drawn(sizes, rank, dtype, device):
            alone |= results([matrix])
        lowrank.PROGRAMS = 2 * programs
        together = results(drawn(sizes, rank, dtype, device))
        assert together.keys() == alone.keys()
        for name, parts in alone.items():
            assert all(torch.equal(one, other) for one, other in zip(parts, together[name], strict=True)), name
    lowrank.PROGRAMS = usual


def assert_tells(device: str) -> None:
    """What is not finite reaches the product that travels first."""
    for value in (float("nan"), float("inf"), -float("inf")):
        for matrix in drawn([(40, 200)], 3, torch.float32, device, of_each=1):
            matrix.grad[39, 199] = value
            assert not multiply(make_batches([matrix]))[0].isfinite().all()


def assert_some_are_left_to_torch(device: str) -> None:
    """Ranks above MOST, and residuals that are not contiguous, beside others."""
    thick, thin = (drawn([(90, 200)], rank, torch.float32, device)[:1] for rank in (MOST + 1, 3))
    odd = [
        each._replace(residual=each.residual.t().contiguous().t())
        for each in drawn([(30, 50)], 3, torch.float32, device)
    ]
    batches = make_batches([*thin, *odd])
    assert [batch.table is None for batch in batches] == [False, True, True]
    for batch, product in zip(batches, multiply(batches), strict=True):
        M = torch.stack([g + e for g, e in zip(batch.grads, batch.residuals, strict=True)]).double()
        basis = batch.basis.double()
        close(product, M @ basis.mT if batch.right else basis.mT @ M)
    (batch,) = make_batches(thick)
    assert batch.table is None
    close(multiply([batch])[0][0], (thick[0].grad + thick[0].residual).double() @ thick[0].basis.double().t())


SHAPES = {"a": (90, 40), "b": (40, 90), "c": (90, 40), "bias": (9,), "conv": (10, 4, 3, 3), "d": (90, 40)}


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
            grads = [
                {name: torch.randn(shape, generator=draw).to(device) for name, shape in SHAPES.items()} for _ in codecs
            ]
            run_lockstep(codecs, grads, step)
        states = [tensor for by_name in codecs[1].state.values() for tensor in by_name.values()]
        found.append([*grads[0].values(), *states])
    fused.is_available = kernels
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


SIZES = [(2, 1, 1), (32, 128, 4), (33, 129, 4), (400, 300, 5), (40, 3000, 20), (1500, 7, 1), (64, 90, 40)]


def main(device: str) -> None:
    usual = lowrank.PROGRAMS
    for lowrank.PROGRAMS in (2, usual):  # few programs take many steps each
        for n, m, rank in SIZES:
            assert_does_what_the_formulas_say([(n, m)], rank, torch.float32, device)
    for dtype in TYPES:
        assert_does_what_the_formulas_say([(60, 144), (33, 70)], 4, dtype, device, of_each=2)
        assert_does_what_the_formulas_say([(60, 144)], 4, dtype, device, shift=1)
    assert_many_are_as_one(device)
    assert_some_are_left_to_torch(device)
    assert_tells(device)
    for alternate in (False, True):
        assert_the_codec_does_the_same(alternate, device)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"]
    fused.is_available = lambda device: True
    main("cpu")
    print("as it must be")
