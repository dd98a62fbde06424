"""The kernels do what torch's operations do; run as a script where Triton interprets them, and by tests on a GPU."""

from __future__ import annotations

from itertools import product

import torch

from shoestring.sparse import gates, kernels, masks
from shoestring.sparse.mvue import draw_key, mvue
from shoestring.sparse.product import pack, shrink


def drawn(rows: int, columns: int) -> torch.Tensor:
    """Weights of 8 bits of precision, so that many are equal, and sums exact in any order."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    return (values * 32).round() / 32


def check_masks(device: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = drawn(rows, columns).to(dtype)
    assert torch.equal(kernels.row_mask(weight.to(device)).cpu(), masks.row_mask(weight))
    for squares in (False, True):
        ours = kernels.tile_codes(weight.to(device), masks.patterns(torch.device(device)), squares=squares)
        assert torch.equal(ours.cpu(), masks.tile_codes(weight, norm="l2" if squares else "l1"))


def check_draws(device: str, rows: int, columns: int, first: int) -> None:
    x = drawn(rows, columns)
    key = draw_key(3, torch.tensor(11))
    theirs = mvue(x, key, first=first)
    for given in (x, x.t().contiguous().t()):
        for by_columns in (False, True):
            ours = kernels.mvue(given.to(device), key.to(device), first, by_columns=by_columns).cpu()
            assert ours.stride() == ((1, rows) if by_columns else (columns, 1))
            same = ours == theirs  # a division rounded otherwise may move an entry over the edge, once in a million
            assert same.float().mean() > 0.999
            assert torch.equal(ours[:, same.all(0)], theirs[:, same.all(0)])


def check_degenerate(device: str) -> None:
    """Groups of zeros, ones, ties, tiny numbers and NaN, each entry at each place."""
    for entries in ((0.0, 1.0, -5.0, 2.0**-20, 2.0**-140), (0.0, 1.0, 2.0, float("nan"))):
        x = torch.tensor(list(product(entries, repeat=4)))
        ours, theirs = kernels.row_mask(x.to(device)).cpu(), masks.row_mask(x)
        assert torch.equal(ours, theirs) and (ours.sum(1) == 2).all()
        for call in range(64):
            key = draw_key(3, torch.tensor(call))
            ours, theirs = kernels.mvue(x.t().to(device), key.to(device), 0).cpu(), mvue(x.t(), key)
            whole = ~x.isnan().any(1)
            assert torch.equal(ours[:, whole], theirs[:, whole])
            assert ours.t()[x.isnan()].isnan().all()


def check_pruned(device: str, rows: int, columns: int, dtype: torch.dtype, to: torch.dtype) -> None:
    weight = drawn(rows, columns).to(dtype)
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = masks.prune(weight, mask).to(to)
    for straight, transposed in ((True, True), (True, False), (False, True)):
        one, other = kernels.pruned(
            weight.to(device), pack(mask).to(device), to, straight=straight, transposed=transposed
        )
        assert (one is not None) == straight and (other is not None) == transposed
        assert one is None or torch.equal(one.cpu(), expected)
        assert other is None or torch.equal(other.cpu(), expected.t())
    if columns % 4 == 0 and dtype == torch.float32:
        scale = torch.tensor(1.375)
        for narrow in (torch.float32, torch.float16):  # the interpreter truncates to bf16
            ours = kernels.shrunk(weight.to(device), scale.to(device), narrow).cpu()
            assert torch.equal(ours, (shrink(weight) * scale).to(narrow))


def laid(x: torch.Tensor, by_columns: bool) -> torch.Tensor:
    return x.t().contiguous().t() if by_columns else x.contiguous()


def check_gates(device: str, rows: int, columns: int, dtype: torch.dtype, activation: gates.Activation) -> None:
    """Against the CPU form in double precision, of what the kernel is given; it rounds once, to its type.

    To bf16 the interpreter truncates, which is off by up to twice as much.
    """
    draw = torch.Generator().manual_seed(rows)
    allowed = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}[dtype]
    for number, form in enumerate(gates.FORMS):
        widths = (2 * columns if form.startswith("gate") else columns, columns, columns)
        x, other, grad = ((3 * torch.randn(rows, n, generator=draw)).to(dtype) for n in widths)
        given = x, other if form == "apart" else None
        wide = [None if each is None else each.double() for each in given]
        expected = [torch.ops.shoestring.gated(*wide, activation, form)]
        expected += torch.ops.shoestring.gated_backward(grad.double(), *wide, activation, form)
        for by_columns, of_grad in ((False, bool(number % 2)), (True, True), (True, False)):
            sent = [None if each is None else laid(each, by_columns).to(device) for each in given]
            gate, up = gates.parts(*sent, form)
            out = kernels.gated(gate, up, gates.empty_like(sent[0], columns), activation)
            of_x = gates.empty_like(sent[0], widths[0])
            of_other = gates.empty_like(sent[0], columns if form == "apart" else 0)
            of_parts = gates.parts(of_x, of_other if form == "apart" else None, form)
            kernels.gated_backward(laid(grad, of_grad).to(device), gate, up, *of_parts, activation)
            for ours, theirs in zip((out, of_x, of_other), expected, strict=True):
                rounding = allowed * theirs.abs() + 1e-6 * theirs.abs().amax() if theirs.numel() else theirs
                assert ((ours.cpu().double() - theirs).abs() <= rounding).all(), (activation, form, dtype)
                assert ours.numel() == 0 or gates.by_columns(ours) == by_columns


def main(device: str) -> None:
    for rows, columns in ((4, 4), (4, 260), (64, 128), (132, 20)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_masks(device, rows, columns, dtype)
    for rows, columns in ((4, 2), (6, 7), (64, 128), (33, 130)):
        for first in (0, 5, 1 << 29):
            check_draws(device, rows, columns, first)
    check_degenerate(device)
    for rows, columns in ((4, 4), (5, 9), (64, 128), (70, 68)):
        for dtype, to in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
            check_pruned(device, rows, columns, dtype, to)
    for activation in gates.ACTIVATIONS:
        check_gates(device, 3, 5, torch.float32, activation)
        check_gates(device, 16, 8, torch.float16, activation)
    check_gates(device, 66, 70, torch.bfloat16, "silu")


if __name__ == "__main__":
    main("cpu")
    print("as it must be")
