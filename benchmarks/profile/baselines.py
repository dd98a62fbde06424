"""Measures what operators cost on this CPU, forward and backward, for the analyses of a profile to compare with.

`python -m benchmarks.profile.baselines` writes `src/shoestring/profile/analyses/cpu.json`: of each operator and each of
`SIZES` elements the nanoseconds of a call on one thread, and of its gradient. Absolute numbers differ from one machine
to the next; the analyses use how they relate to each other.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.profile.analyses import costs

SIZES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 21)
WIDTH = 64
PARAMETERS = 32
"""Tensors that an optimizer updates; what is written is the time of one."""

CHAIN = 8
"""Operators of which each is given what the one before has made."""

Operator = Callable[[Tensor, Tensor], Tensor]


def _operators() -> dict[str, Operator]:
    """Each takes a matrix with `WIDTH` columns and positive entries, and the same without a gradient."""
    weight, bias = torch.ones(WIDTH), torch.zeros(WIDTH)
    square = torch.randn(WIDTH, WIDTH)
    unary = ("abs cos erf exp expm1 log log1p neg reciprocal relu rsqrt sigmoid sin sqrt square tanh").split()  # noqa: SIM905
    found: dict[str, Operator] = {f"aten::{name}": _unary(getattr(torch, name)) for name in unary}
    found |= {
        "aten::pow": lambda x, o: x**3,
        "aten::add": lambda x, o: x + o,
        "aten::sub": lambda x, o: x - o,
        "aten::mul": lambda x, o: x * o,
        "aten::div": lambda x, o: x / o,
        "aten::rsub": lambda x, o: 1 - x,
        "aten::clamp": lambda x, o: x.clamp(0.1, 0.9),
        "aten::maximum": lambda x, o: torch.maximum(x, o),
        "aten::where": lambda x, o: torch.where(o > 0.5, x, o),
        "aten::masked_fill": lambda x, o: x.masked_fill(o > 0.5, 0.0),
        "aten::gt": lambda x, o: o > 0.5,
        "aten::copy_": lambda x, o: torch.empty_like(x).copy_(x),
        "aten::clone": lambda x, o: x.clone(),
        "aten::contiguous": lambda x, o: x.t().contiguous(),
        "aten::sum": lambda x, o: x.sum(-1),
        "aten::mean": lambda x, o: x.mean(-1),
        "aten::var": lambda x, o: x.var(-1),
        "aten::std": lambda x, o: x.std(-1),
        "aten::amax": lambda x, o: x.amax(-1),
        "aten::max": lambda x, o: x.max(-1)[0],
        "aten::logsumexp": lambda x, o: x.logsumexp(-1),
        "aten::softmax": lambda x, o: x.softmax(-1),
        "aten::log_softmax": lambda x, o: x.log_softmax(-1),
        "aten::gelu": lambda x, o: F.gelu(x),
        "aten::gelu_tanh": lambda x, o: F.gelu(x, approximate="tanh"),
        "aten::silu": lambda x, o: F.silu(x),
        "aten::mish": lambda x, o: F.mish(x),
        "aten::softplus": lambda x, o: F.softplus(x),
        "aten::hardswish": lambda x, o: F.hardswish(x),
        "aten::leaky_relu": lambda x, o: F.leaky_relu(x),
        "aten::elu": lambda x, o: F.elu(x),
        "aten::dropout": lambda x, o: F.dropout(x, 0.1),
        "aten::layer_norm": lambda x, o: F.layer_norm(x, (WIDTH,), weight, bias),
        "aten::rms_norm": lambda x, o: F.rms_norm(x, (WIDTH,), weight),
        "aten::mse_loss": lambda x, o: F.mse_loss(x, o * 0.5),
        "aten::l1_loss": lambda x, o: F.l1_loss(x, o * 0.5),
        "aten::smooth_l1_loss": lambda x, o: F.smooth_l1_loss(x, o * 0.5),
        "aten::huber_loss": lambda x, o: F.huber_loss(x, o * 0.5),
        "aten::binary_cross_entropy_with_logits": lambda x, o: F.binary_cross_entropy_with_logits(x, o),
        "aten::lerp": lambda x, o: torch.lerp(x, o, 0.1),
        "aten::addcmul": lambda x, o: torch.addcmul(x, o, o),
        "aten::linear": lambda x, o: F.linear(x, square),
        "aten::matmul": lambda x, o: x @ square,
        "aten::cat": lambda x, o: torch.cat([x, o]),
        "aten::stack": lambda x, o: torch.stack([x, o]),
        "aten::repeat": lambda x, o: x.repeat(2, 1),
        "aten::cumsum": lambda x, o: x.cumsum(0),
        "aten::pad": lambda x, o: F.pad(x, (1, 1)),
        "aten::roll": lambda x, o: x.roll(1, 0),
        "aten::flip": lambda x, o: x.flip(0),
        "aten::index_select": lambda x, o: x.index_select(0, _rows(x)),
        "aten::gather": lambda x, o: x.gather(0, _rows(x)[:, None].expand(-1, WIDTH)),
        "aten::embedding": lambda x, o: F.embedding(_rows(x), x),
        "aten::index": lambda x, o: x[torch.arange(len(x))],
        "aten::sort": lambda x, o: x.sort(-1)[0],
        "aten::topk": lambda x, o: x.topk(8, -1)[0],
        "aten::conv1d": lambda x, o: F.conv1d(x.t()[None], square[:, :, None].expand(-1, -1, 3), padding=1),
        "aten::max_pool1d": lambda x, o: F.max_pool1d(x[None], 2),
        "aten::scaled_dot_product_attention": lambda x, o: _attend(x),
    }
    return found


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda x, o: function(x)


def _rows(x: Tensor) -> Tensor:
    return torch.arange(len(x))


def _attend(x: Tensor) -> Tensor:
    heads = x.view(-1, min(len(x), 64), WIDTH)
    return F.scaled_dot_product_attention(heads, heads, heads)


def _updates() -> dict[str, Callable[[list[Tensor]], Callable[[], object]]]:
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": lambda p, **k: torch.optim.SGD(p, 1e-3, **k),
        "SGD momentum": lambda p, **k: torch.optim.SGD(p, 1e-3, momentum=0.9, **k),
        "Adam": lambda p, **k: torch.optim.Adam(p, **k),
        "AdamW": lambda p, **k: torch.optim.AdamW(p, **k),
        "RMSprop": lambda p, **k: torch.optim.RMSprop(p, **k),
        "Adagrad": lambda p, **k: torch.optim.Adagrad(p, **k),
    }

    def stepping(make: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[..., Callable[[], object]]:
        return lambda parameters: make(parameters, **options).step

    ways = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    return {
        f"{name} {way}": stepping(make, **options)
        for name, make in optimizers.items()
        for way, options in ways.items()
        if not (way == "fused" and name == "RMSprop")
    }


def _recording(size: int) -> float:
    """Seconds that an operator of a chain takes longer where it records for the backward pass and keeps its input."""
    weight = torch.ones(WIDTH, requires_grad=True)
    x = torch.rand(size // WIDTH, WIDTH)

    def chain() -> Tensor:
        y = x
        for _ in range(CHAIN):
            y = y * weight
        return y

    def without() -> Tensor:
        with torch.no_grad():
            return chain()

    recorded, not_recorded = _seconds(chain, without)
    return max(recorded - not_recorded, 0.0) / CHAIN


def _seconds(*works: Callable[[], object], least: float = 0.002, rounds: int = 9) -> list[float]:
    """Of a call of each, the least of the rounds, which alternate between them."""
    calls = [_calls(work, least) for work in works]
    taken = [[_timed(work, n) / n for work, n in zip(works, calls, strict=True)] for _ in range(rounds)]
    return [min(each) for each in zip(*taken, strict=True)]


def _calls(work: Callable[[], object], least: float) -> int:
    """How many of them take at least so many seconds."""
    work()
    calls = 1
    while (taken := _timed(work, calls)) < least:
        calls = max(2 * calls, int(calls * least / max(taken, 1e-6)))
    return calls


def _timed(work: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        work()
    return time.process_time() - start


def measure() -> dict[str, dict[str, list[float]]]:
    """Nanoseconds by operator, direction and size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table: dict[str, dict[str, list[float]]] = {}
    start = torch.zeros(1, requires_grad=True)
    end, one = start.view_as(start), torch.ones(1)

    def engine() -> object:
        return torch.autograd.grad(end, start, one, retain_graph=True)

    for name, operator in _operators().items():
        forward, backward = [], []
        for size in SIZES:
            x = torch.rand(size // WIDTH, WIDTH).add_(0.1).requires_grad_()
            other = x.detach()
            forward.append(round(1e9 * _seconds(lambda: operator(x, other))[0]))  # noqa: B023
            y = operator(x, other)
            if not y.requires_grad:
                continue
            given = torch.ones_like(y)
            taken, empty = _seconds(lambda: torch.autograd.grad(y, x, given, retain_graph=True), engine)  # noqa: B023
            backward.append(round(1e9 * max(taken - empty, 1e-6)))
        table[name] = {"forward": forward, **({"backward": backward} if backward else {})}
        print(name, table[name], flush=True)
    table["recording"] = {"forward": [round(1e9 * _recording(size)) for size in SIZES]}
    for name, make in _updates().items():
        times: list[float] = []
        for size in SIZES[:-1]:
            parameters = [torch.rand(size).requires_grad_() for _ in range(PARAMETERS)]
            for parameter in parameters:
                parameter.grad = torch.rand(size)
            times.append(round(1e9 * _seconds(make(parameters))[0] / PARAMETERS))
        table[name] = {"forward": times}
        print(name, table[name], flush=True)
    return table


def growing(times: Sequence[float]) -> list[float]:
    """Of sizes that grow: what took longer than a larger one was disturbed, and takes as long as that at most."""
    return list(accumulate(reversed(times), min))[::-1]


def main() -> int:
    gc.disable()
    measured = {
        name: {way: growing(times) for way, times in directions.items()} for name, directions in measure().items()
    }
    text = json.dumps({"sizes": SIZES, "nanoseconds": measured}, separators=(",", ":"))
    Path(costs.__file__).with_name("cpu.json").write_text(text.replace('},"', '},\n"') + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
