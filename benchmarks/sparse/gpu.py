"""Bars that need a GPU with sparse units: products, a feed-forward layer and a whole step, against the best dense ones.

The dense side searches its algorithms too (torch's TunableOp); both take turns, on the device's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.timing import gpu_seconds

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, ROUNDS, CALLS = 8192, 11, 10
WIDE = ((14336, 4096), (4096, 14336))  # rows and columns of the weights of a feed-forward layer of an 8 B model
SHAPES = [(tokens, rows, columns) for tokens in (512, 2048, 8192) for rows, columns in (
    (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), *WIDE, (1000, 4096), (4096, 1000),
)]  # fmt: skip


def speedup(dense: Callable[[], object], sparse: Callable[[], object]) -> float:
    """The median of the ratios of rounds in which both take turns, after one that searches algorithms."""
    import torch

    torch.cuda.tunable.enable()
    for work in (dense, sparse):
        work()
    torch.cuda.tunable.tuning_enable(False)
    ratios = [gpu_seconds(dense, CALLS) / gpu_seconds(sparse, CALLS) for _ in range(ROUNDS)]
    torch.cuda.tunable.tuning_enable(True)
    return median(ratios)


def operands(tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    import torch

    from shoestring.sparse.masks import prune, row_mask

    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16), prune(weight, row_mask(weight))


def raw_products(_: Deadline) -> Measured:
    """The sparse product alone, compressed beforehand and by its best algorithm."""
    import torch

    from shoestring._torch import cslt_compress, cslt_sparse_mm, cslt_sparse_mm_search

    found = []
    for rows, columns in WIDE:
        x, weight = operands(TOKENS, rows, columns)
        packed = cslt_compress(weight)
        best = cslt_sparse_mm_search(packed, x.t(), transpose_result=True)
        sparse = partial(cslt_sparse_mm, packed, x.t(), transpose_result=True, alg_id=best)
        found.append(speedup(partial(torch.nn.functional.linear, x, weight), sparse))
    return Measured(min(found), "; ".join(f"{c} to {r}: {s:.2f}x" for (r, c), s in zip(WIDE, found, strict=True)))


def every_shape(_: Deadline) -> Measured:
    """What a layer calls, compression included: it falls back where sparse products are slower."""
    import torch

    from shoestring.sparse.semi_structured import times_transposed, trials

    found = {}
    for shape in SHAPES:
        x, weight = operands(*shape)
        found[shape] = speedup(partial(torch.nn.functional.linear, x, weight), partial(times_transposed, x, weight))
    worst = min(found, key=lambda shape: found[shape])
    sparse = sum(trial.faster for trial in trials.values())
    return Measured(found[worst], f"slowest: {worst}; {sparse} of {len(SHAPES)} shapes are sparse")


def feed_forward(sparse_along: int, draws: bool, _: Deadline) -> Measured:
    """Forward and backward pass of a gated feed-forward layer of an 8 B model, everything included."""
    import torch

    from shoestring.sparse.masks import row_mask, transposable_mask
    from shoestring.sparse.mvue import draw_key
    from shoestring.sparse.product import Pruned, pack, product

    x = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((2 * 14336, 4096), (4096, 14336))
    ]
    mask = transposable_mask if sparse_along == 2 else row_mask
    masks = [pack(mask(weight.detach())) for weight in weights]
    key = draw_key(0, torch.ones((), dtype=torch.int64, device="cuda")) if draws else None

    def run(linear: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        gate, up = linear(x, weights[0], masks[0]).chunk(2, dim=-1)
        linear(torch.nn.functional.silu(gate) * up, weights[1], masks[1]).sum().backward()

    def dense(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    def sparse(x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        return product(x, Pruned.apply(weight, mask), None, key, sparse_along=sparse_along)

    compiled = [torch.compile(partial(run, linear)) for linear in (dense, sparse)]
    return Measured(speedup(*compiled), f"{TOKENS} tokens, 4096 to 14336 and back, compiled")


def whole_step(_: Deadline) -> Measured:
    """A compiled step of a decoder of 1.1 B parameters in bf16, AdamW included: T-SR-STE against dense training."""
    import torch

    import shoestring as ss
    from shoestring.models.gpt import gpt1b

    def stepping(*features: Any) -> Callable[[], object]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = gpt1b()
        job = ss.Job(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True))
        ss.compose(job, [*features, ss.precision.Autocast(dtype="bf16"), ss.graph.Compile()])
        tokens = torch.randint(50304, (8, 2048), device="cuda")
        return partial(job.step, {"inputs": tokens, "targets": tokens.roll(-1, 1)})

    ratio = speedup(stepping(), stepping(ss.sparse.TSRSTE(calibrate=0.0, tail=0.0)))
    return Measured(ratio, "16,384 tokens, feed-forward layers sparse in two products of three")


def equal(_: Deadline) -> Measured:
    """The largest relative error of output and gradients over the shapes, against the dense product of the operands."""
    import torch

    from shoestring.sparse.product import product

    worst = 0.0
    for shape in SHAPES:
        x, weight = (each.requires_grad_() for each in operands(*shape))
        grad = torch.randn(shape[0], shape[1], device="cuda", dtype=torch.bfloat16)
        y = product(x, weight, None, sparse_along=1)
        of_x, of_weight = torch.autograd.grad(y, [x, weight], grad)
        wide_x, wide_weight, wide_grad = x.detach().float(), weight.detach().float(), grad.float()
        wanted = (wide_x @ wide_weight.t(), wide_grad @ wide_weight, wide_grad.t() @ wide_x)
        for found, expected in zip((y, of_x, of_weight), wanted, strict=True):
            worst = max(worst, float((found.float() - expected).norm() / expected.norm()))
    return Measured(worst, f"{len(SHAPES)} shapes, in fp32 beside it")


def rows() -> list[Bar]:
    """All bars that need a GPU."""
    layer = "forward and backward pass of a feed-forward layer, times as fast as dense"

    def bar(name: str, what: str, op: Any, value: float, measure: Callable[[Deadline], Measured]) -> Bar:
        return Bar(f"sparse.gpu-{name}", what, op, value, measure=measure, baseline="torch", gpu=True)

    return [
        bar(
            "product", "a sparse product of 8192 tokens, times as fast as the best dense one", ">=", 1.45, raw_products
        ),
        bar("shapes", "a layer's product, times as fast as dense: the slowest of 24 shapes", ">=", 0.98, every_shape),
        bar("layer-2", f"{layer}: two products of three sparse", ">=", 1.15, partial(feed_forward, 2, False)),
        bar("layer-3", f"{layer}: all three sparse", ">=", 1.25, partial(feed_forward, 2, True)),
        bar("step", "a compiled step of a decoder of 1.1 B parameters, times as fast as dense", ">=", 1.10, whole_step),
        bar("equal", "relative error of sparse layers against products of their operands in fp32", "<=", 0.01, equal),
    ]
