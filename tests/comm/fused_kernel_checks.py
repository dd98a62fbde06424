"""What the kernels of `fused` must do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import sparse_ranks as contract
import torch

from shoestring.comm.codecs import fused, grad_table
from shoestring.comm.codecs.dgc import DGCCodec
from shoestring.comm.codecs.flat import FlatCodec
from shoestring.comm.codecs.fused import Taken, WeightedSum, take_entries
from shoestring.comm.codecs.grad_table import BLOCK, GradTable
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.topk import TopKCodec

HALVES = (torch.bfloat16, torch.float16)
MAKERS = [
    partial(TopKCodec, 0.02),
    partial(TopKCodec, 0.1, selection="sampled", wire="bf16"),
    partial(TopKCodec, 0.05, per_layer=True),
    partial(TopKCodec, 0.5),
    partial(DGCCodec, 0.05, nesterov=True),
    partial(DGCCodec, 0.02, warmup=3),
]


def take_by_torch(terms: WeightedSum, threshold: torch.Tensor, room: int) -> Taken:
    """What `take_entries` must do."""
    M = terms.build()
    hits = (M.abs() > threshold).nonzero().view(-1)
    fit = hits if len(hits) <= room else hits[:0]
    return Taken(fit, M[fit], len(hits) <= room, 0 * M.sum())


def drawn(n: int, device: str) -> list[torch.Tensor]:
    """Gradient, residual and velocity, from the second entry of their memory on: nothing is aligned."""
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n + 1, generator=generator)[1:].to(device) for _ in range(3)]


def lying(device: str, *, mixed: bool) -> list[torch.Tensor]:
    """Gradients of several shapes, one without entries: of several types and unaligned, or in bf16 and aligned."""
    sizes = (1, 2049, 0, 40, 2 * BLOCK, 700) if mixed else (BLOCK, 64, 3 * BLOCK + 8, 2 * BLOCK - 8, 16)
    generator, found = torch.Generator().manual_seed(0), []
    for index, size in enumerate(sizes):
        dtype = (*HALVES, torch.float32)[index % 3] if mixed else torch.bfloat16
        found.append(torch.randn(size + mixed, generator=generator).to(device, dtype)[int(mixed) :])
    return [each.view(-1, 8) if each.numel() % 8 == 0 else each for each in found]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.float().view(-1) for each in tensors])


def assert_rounded(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 0.0) -> None:
    """But for the interpreter, which cuts bf16 off where a GPU rounds."""
    cut = 2.0**-7 if ours.dtype == torch.bfloat16 and ours.device.type == "cpu" else 0.0
    torch.testing.assert_close(ours, theirs, rtol=cut + tolerance, atol=tolerance)


def assert_same(ours: Taken, theirs: Taken, tolerance: float) -> None:
    assert torch.equal(ours.indices, theirs.indices)
    torch.testing.assert_close(ours.values, theirs.values, rtol=tolerance, atol=tolerance)
    assert ours.complete
    assert float(ours.poison) == 0


def assert_takes_all(device: str, n: int, threshold: float, momentum: bool) -> None:
    """Bit by bit what torch does where nothing is multiplied, and within its rounding otherwise."""
    g, e, u = drawn(n, device)
    terms = WeightedSum(g, e, u, 1.9, 0.9) if momentum else WeightedSum(g, e)
    expected = replace(terms, g=g.clone())
    bound = torch.tensor(threshold, device=device)
    theirs, ours = take_by_torch(expected, bound, n), take_entries(terms, bound, n)
    tolerance = 1e-6 if momentum else 0.0
    assert_same(ours, theirs, tolerance)
    torch.testing.assert_close(terms.g, expected.g, rtol=tolerance, atol=tolerance)
    assert torch.equal(e, drawn(n, device)[1])


def assert_takes_all_or_none(device: str) -> None:
    g, e, _ = drawn(9000, device)
    M, bound = g + e, torch.tensor(1.0, device=device)
    count = int((M.abs() > 1).sum())
    for room in (count, count - 1):
        taken = take_entries(WeightedSum(g.clone(), e), bound, room)
        assert taken.complete is (room == count)
        assert len(taken.indices) == len(taken.values) == count * taken.complete
    take_entries(WeightedSum(g, e), bound, 100)
    assert torch.equal(g, M)


def assert_tells(device: str) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        g, e, _ = drawn(5000, device)
        g[4500] = value
        assert take_entries(WeightedSum(g, e), torch.tensor(3.0, device=device), 5000).poison.isnan()


def assert_reads_in_place(device: str, *, mixed: bool) -> None:
    """What it does of the same gradients in one tensor: entries, M, and the sample, bit by bit."""
    tensors = lying(device, mixed=mixed)
    g, table = flat(tensors), GradTable(tensors)
    n = len(g)
    _, e, u = drawn(n, device)
    e, u = (e, u) if mixed else (e.clone(), u.clone())
    for momentum in (None, u):
        terms = WeightedSum(torch.full_like(e, torch.nan), e, momentum, 1.9, 0.9, table)
        plain = replace(terms, g=g.clone(), table=None)
        by_hand = g.double() * 1.9 + e + (0 if momentum is None else 0.9 * u.double())
        for stride in (1, 7, n):
            torch.testing.assert_close(terms.sample(stride).double(), by_hand[::stride], rtol=1e-6, atol=1e-6)
        bound = torch.tensor(2.0, device=device)
        assert_same(take_entries(terms, bound, n), take_entries(plain, bound, n), 0.0)
        assert torch.equal(terms.g, plain.g)
        torch.testing.assert_close(terms.g.double(), by_hand, rtol=1e-6, atol=1e-6)
        assert torch.equal(terms.sample(3), terms.g[::3])
    assert torch.equal(flat(tensors), g)


def assert_accelerates(device: str, *, mixed: bool) -> None:
    """As torch's operations do, bit by bit: a product is rounded before something is added."""
    tensors = lying(device, mixed=mixed)
    g, table = flat(tensors), GradTable(tensors)
    for nesterov in (False, True):
        u = drawn(len(g), device)[2]
        u = u if mixed else u.clone()
        expected = u.add(g).mul(0.9) if nesterov else u.mul(0.9).add(g)
        table.accelerate(u, 0.9, nesterov=nesterov)
        assert torch.equal(u, expected)


def assert_writes(device: str, *, mixed: bool) -> None:
    """Rounded as torch rounds, where it is told, zero elsewhere; an index may come twice."""
    tensors = lying(device, mixed=mixed)
    n = sum(each.numel() for each in tensors)
    values, expected = drawn(n, device)[0], torch.zeros(n, device=device)
    indices = torch.arange(0, n, 3, device=device)
    expected[indices] = values[indices]
    GradTable(tensors).write(torch.stack([indices, indices.flip(0)]), values)
    parts = expected.split([each.numel() for each in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        assert_rounded(tensor, part.view(tensor.shape).to(tensor.dtype))


def some_gradients(step: int, device: str) -> dict[str, torch.Tensor]:
    """Of which some are equal, and one is in fp32."""
    shapes = {"w": (33, 70), "even": (16, 128), "b": (24,), "none": (0, 3), "x": (9, 20)}
    generator = torch.Generator().manual_seed(step)
    grads = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    grads["even"].fill_(step / 2 - 0.5)
    return {name: each.to(device, torch.float32 if name == "b" else torch.bfloat16) for name, each in grads.items()}


def ran(make: Callable[[], FlatCodec], device: str, *, kernels: bool) -> list[torch.Tensor]:
    """Averages and state of two ranks over three steps, by the kernels or by torch."""
    codecs, found = [make() for _ in range(2)], []
    with ExitStack() as stack:
        for module in (grad_table, fused):
            stack.enter_context(patch.object(module, "has_kernels", lambda _: kernels))
        for step in range(3):
            grads = [some_gradients(2 * step + rank, device) for rank in range(2)]
            run_lockstep(codecs, grads, step)
            found += [each for own in grads for each in own.values()]
    return [*found, *(each for codec in codecs for of_kind in codec.state.values() for each in of_kind.values())]


def assert_the_codec_does_the_same(make: Callable[[], FlatCodec], device: str) -> None:
    tolerance = 1e-6 if isinstance(make(), DGCCodec) else 0.0  # torch may round g + momentum u once
    by_torch = ran(make, device, kernels=False)
    with patch.object(GradTable, "write", side_effect=GradTable.write, autospec=True) as write:
        by_kernels = ran(make, device, kernels=True)
    assert bool(write.called) is make().reads_in_place
    for ours, theirs in zip(by_kernels, by_torch, strict=True):
        assert_rounded(ours, theirs, tolerance)


def assert_keeps_the_contract(make: Callable[[], FlatCodec]) -> None:
    """By the kernels, on a CPU: given up it knows what it knew, and buffers take no more room."""
    with ExitStack() as stack:
        for module in (grad_table, fused):
            stack.enter_context(patch.object(module, "has_kernels", lambda _: True))
        contract.assert_untouched_when_given_up(make)
        contract.assert_exposes(make, "matrix", 39)
        if not isinstance(make(), DGCCodec):
            contract.assert_conserves(make, steps=3)
            contract.assert_survives_other_cohorts(make)


def main(device: str) -> None:
    for n in (1, 2047, 2048, 9000):
        for threshold in (-1.0, 1.5, 100.0):
            for momentum in (False, True):
                assert_takes_all(device, n, threshold, momentum)
    assert_takes_all_or_none(device)
    assert_tells(device)
    for mixed in (False, True):
        assert_reads_in_place(device, mixed=mixed)
        assert_accelerates(device, mixed=mixed)
        assert_writes(device, mixed=mixed)
    for make in MAKERS:
        assert_the_codec_does_the_same(make, device)
    for make in (MAKERS[0], MAKERS[4], MAKERS[6]) if device == "cpu" else ():
        assert_keeps_the_contract(make)


if __name__ == "__main__":
    main("cpu")
    print("as it must be")
