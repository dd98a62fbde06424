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


def speedup(dense: Callable[[], object], sparse: Callable[[], object], calls: int = CALLS) -> float:
    """The median of the ratios of rounds in which both take turns, after one that searches algorithms."""
    import torch

    torch.cuda.tunable.enable()
    torch.cuda.tunable.tuning_enable(True)
    try:
        for work in (dense, sparse):
            work()
        torch.cuda.tunable.tuning_enable(False)
        return median(gpu_seconds(dense, calls) / gpu_seconds(sparse, calls) for _ in range(ROUNDS))
    finally:
        torch.cuda.tunable.enable(False)  # other bars do without


def operands(tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    import torch

    from shoestring.sparse.masks import prune, row_mask

    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16), prune(weight, row_mask(weight))


def raw_products(_: Deadline) -> Measured:
    """The sparse product alone, packed beforehand and by its best algorithm; in the layout that is faster, which a
    layer has by rows where its output is added to others, and by columns where an activation is fused."""
    import torch

    from shoestring._torch import cslt_compress, cslt_sparse_mm_search
    from shoestring.sparse.semi_structured import multiplied

    found, notes = [], []
    for rows, columns in WIDE:
        x, weight = operands(TOKENS, rows, columns)
        packed = cslt_compress(weight)
        speeds = []
        for by_columns in (False, True):
            best = cslt_sparse_mm_search(packed, x.t(), transpose_result=not by_columns)
            sparse = partial(multiplied, packed, x, best, by_columns=by_columns)
            speeds.append(speedup(partial(torch.nn.functional.linear, x, weight), sparse))
        found.append(max(speeds))
        notes.append(f"{columns} to {rows}: {speeds[0]:.2f}x by rows, {speeds[1]:.2f}x by columns")
    return Measured(min(found), "; ".join(notes))


def layer_of(weight: Tensor, *, both: bool) -> tuple[Any, Any]:
    """A sparse weight's operand, and its mask, as `TSRSTE` and `SRSTE` have them."""
    from shoestring.sparse.masked import pruned_forms
    from shoestring.sparse.masks import row_mask, transposable_mask
    from shoestring.sparse.operands import SparseOperand
    from shoestring.sparse.product import pack

    mask = pack((transposable_mask if both else row_mask)(weight.detach()))

    def prune(weight: Tensor, dtype: Any, **forms: bool) -> Any:
        return pruned_forms(weight, mask, dtype, **forms)

    return SparseOperand(prune, both=both), mask


def every_shape(_: Deadline) -> Measured:
    """A layer's product, pruning and packing included, as if each were the only one of its step.

    It falls back where sparse products are slower. Dense is the same layer, pruned, by a dense product.
    """
    import torch

    from shoestring.sparse.masked import pruned_forms
    from shoestring.sparse.operands import times_weight
    from shoestring.sparse.semi_structured import trials

    found, before = {}, len(trials)
    for shape in SHAPES:
        x, weight = operands(*shape)
        operand, mask = layer_of(weight, both=False)

        def sparse(x: Tensor = x, weight: Tensor = weight, operand: Any = operand) -> None:
            operand.forget()
            times_weight(x, weight, operand.number, False, False)

        def dense(x: Tensor = x, weight: Tensor = weight, mask: Tensor = mask) -> None:
            pruned, _ = pruned_forms(weight, mask, weight.dtype, straight=True, transposed=False)
            assert pruned is not None
            torch.nn.functional.linear(x, pruned)

        found[shape] = speedup(dense, sparse)
    worst = min(found, key=lambda shape: found[shape])
    fast = sum(trial.faster for trial in list(trials.values())[before:])
    return Measured(found[worst], f"slowest: {worst}; {fast} of {len(SHAPES)} shapes are sparse")


def feed_forward(both: bool, draws: bool, _: Deadline) -> Measured:
    """Forward and backward pass of a gated feed-forward layer of an 8 B model in fp32, everything included.

    Sparse: pruning and packing once, as after an optimizer's step, trials of shapes before; products, draws, and the
    fused activation. Dense: autocast's copies, products, and torch.compile's fusion. Both are compiled.
    """
    import torch

    from shoestring.sparse.gates import gated
    from shoestring.sparse.mvue import draw_key
    from shoestring.sparse.product import SparseUnits, product

    x = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((2 * 14336, 4096), (4096, 14336))]
    grad = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16)
    layers = [layer_of(weight, both=both)[0] for weight in weights]
    units = SparseUnits(layers[0].number, outputs_by_columns=True), SparseUnits(layers[1].number, False, True)
    key = draw_key(0, torch.ones((), dtype=torch.int64, device="cuda")) if draws else None

    @torch.compile(fullgraph=True)
    def dense() -> Tensor:
        gate, up = torch.nn.functional.linear(x, weights[0]).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weights[1])

    @torch.compile(fullgraph=True)
    def sparse() -> Tensor:
        hidden = gated(product(x, weights[0], None, key, units=units[0]), None, "silu", "gate_first")
        return product(hidden, weights[1], None, key, units=units[1])

    def run(layer: Callable[[], Tensor]) -> None:
        for operand in layers:
            operand.forget()
        with torch.autocast("cuda", torch.bfloat16):
            y = layer()
        torch.autograd.backward(y, grad, inputs=[x, *weights])
        for each in (x, *weights):
            each.grad = None

    note = f"{TOKENS} tokens, 4096 to 14336 and back, fp32 weights, compiled"
    return Measured(speedup(partial(run, dense), partial(run, sparse)), note)


def activation(_: Deadline) -> Measured:
    """The fused activation on tensors that lie by columns, against torch.compile's fusion on the same ones."""
    import torch

    from shoestring.sparse.gates import gated

    def by_columns(columns: int) -> Tensor:
        return torch.randn(columns, TOKENS, device="cuda", dtype=torch.bfloat16).t()

    y, grad = by_columns(2 * 14336).requires_grad_(), by_columns(14336)

    @torch.compile(fullgraph=True)
    def dense() -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def run(layer: Callable[[], Tensor]) -> None:
        torch.autograd.grad(layer(), y, grad)

    fused = partial(gated, y, None, "silu", "gate_first")
    return Measured(speedup(partial(run, dense), partial(run, fused)), f"SwiGLU of {TOKENS} tokens by 14336")


def packing(_: Deadline) -> Measured:
    """W and Wᵀ pruned and packed in one pass each, against pruning and compressing each direction for its product."""
    import torch

    from shoestring._torch import cslt_compress
    from shoestring.sparse.masked import pruned_forms
    from shoestring.sparse.operands import WeightForms
    from shoestring.sparse.semi_structured import tiled

    weight = torch.randn(14336, 4096, device="cuda")
    operand, mask = layer_of(weight, both=True)

    def apart() -> None:
        for transposed in (False, True):
            pruned, _ = pruned_forms(weight, mask, torch.bfloat16, straight=True, transposed=False)
            assert pruned is not None
            cslt_compress(pruned.t().contiguous() if transposed else pruned)

    def at_once() -> None:
        WeightForms(operand, weight, torch.bfloat16, both=True).pack(transposed=False)

    found = speedup(apart, at_once)
    return Measured(found, f"14336 x 4096; torch's tile kernel {'serves' if any(tiled.values()) else 'does not serve'}")


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

    ratio = speedup(stepping(), stepping(ss.sparse.TSRSTE(calibrate=0.0, tail=0.0)), calls=2)
    return Measured(ratio, "16,384 tokens, feed-forward layers sparse in two products of three")


def equal(_: Deadline) -> Measured:
    """The largest relative error of output and gradients over the shapes, against the dense product of the operands."""
    import torch

    from shoestring.sparse.product import SparseUnits, product

    worst = 0.0
    for shape in SHAPES:
        x, weight = (each.requires_grad_() for each in operands(*shape))
        operand, _ = layer_of(weight, both=False)
        grad = torch.randn(shape[0], shape[1], device="cuda", dtype=torch.bfloat16)
        for by_columns in (False, True):
            if any(size % 16 for size in weight.shape):
                y = product(x, weight, None)
            else:
                y = product(x, weight, None, units=SparseUnits(operand.number, by_columns, by_columns))
            of_x, of_weight = torch.autograd.grad(y, [x, weight], grad)
            wide_x, wide_weight, wide_grad = x.detach().float(), weight.detach().float(), grad.float()
            wanted = (wide_x @ wide_weight.t(), wide_grad @ wide_weight, wide_grad.t() @ wide_x)
            for found, expected in zip((y.detach(), of_x, of_weight), wanted, strict=True):
                worst = max(worst, float((found.float() - expected).norm() / expected.norm()))
    return Measured(worst, f"{len(SHAPES)} shapes in both layouts, in fp32 beside it")


def equal_both(draws: bool, _: Deadline) -> Measured:
    """As `equal`, of a whole SwiGLU layer that is 2:4 in rows and columns, against torch's operations in fp32."""
    import torch

    from shoestring.sparse.gates import gated
    from shoestring.sparse.masks import prune, transposable_mask
    from shoestring.sparse.mvue import draw_key, mvue
    from shoestring.sparse.product import SparseUnits, product

    x, *weights = (torch.randn(*shape, device="cuda") for shape in ((2048, 2048), (2 * 4096, 2048), (2048, 4096)))
    weights = [prune(weight, transposable_mask(weight)) / 64 for weight in weights]
    x, *weights = (each.bfloat16().requires_grad_() for each in (x, *weights))
    grad = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    key = draw_key(0, torch.ones((), dtype=torch.int64, device="cuda")) if draws else None
    layers = [layer_of(weight, both=True)[0] for weight in weights]
    up, down = SparseUnits(layers[0].number, True, False), SparseUnits(layers[1].number, False, True)
    first = product(x, weights[0], None, key, units=up)
    hidden = gated(first, None, "silu", "gate_first")
    y = product(hidden, weights[1], None, key, units=down)
    of_hidden, of_x, *of_weights = torch.autograd.grad(y, [hidden, x, *weights], grad)
    wide = [each.detach().float().requires_grad_() for each in (x, *weights)]
    gate, value = (wide[0] @ wide[1].t()).chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate) * value
    expected = activated @ wide[2].t()
    wanted = [expected, *torch.autograd.grad(expected, [activated, *wide], grad.float())]
    if key is not None:  # the same draws, for both have the same gradient of the output
        wanted[4] = mvue(grad, key).float().t() @ activated
    found = [y.detach(), of_hidden, of_x, *of_weights]
    chosen = (0, 1, 2, 4) if draws else range(5)
    errors = [float((found[i].float() - wanted[i]).norm() / wanted[i].norm()) for i in chosen]
    return Measured(max(errors), "output and gradients of a SwiGLU layer of 2048 by 4096, fused, in fp32 beside it")


def rows() -> list[Bar]:
    """All bars that need a GPU."""
    layer = "forward and backward pass of a feed-forward layer, times as fast as dense"
    error = "relative error of a whole feed-forward layer against torch's operations in fp32"

    def bar(name: str, what: str, op: Any, value: float, measure: Callable[[Deadline], Measured]) -> Bar:
        return Bar(f"sparse.gpu-{name}", what, op, value, measure=measure, baseline="torch", gpu=True)

    return [
        bar(
            "product", "a sparse product of 8192 tokens, times as fast as the best dense one", ">=", 1.45, raw_products
        ),
        bar("shapes", "a layer's product, times as fast as dense: the slowest of 24 shapes", ">=", 0.98, every_shape),
        bar("layer-2", f"{layer}: two products of three sparse", ">=", 1.15, partial(feed_forward, True, False)),
        bar("layer-3", f"{layer}: all three sparse", ">=", 1.25, partial(feed_forward, True, True)),
        bar("step", "a compiled step of a decoder of 1.1 B parameters, times as fast as dense", ">=", 1.10, whole_step),
        bar("activation", "a fused activation by columns, times as fast as torch.compile's", ">=", 1.0, activation),
        bar("packing", "pruning and packing in both directions, times as fast as each by itself", ">=", 1.2, packing),
        bar("equal", "relative error of sparse layers against products of their operands in fp32", "<=", 0.01, equal),
        bar("equal-2", f"{error}: two products sparse", "<=", 0.02, partial(equal_both, False)),
        bar("equal-3", f"{error}: three products sparse", "<=", 0.02, partial(equal_both, True)),
    ]
