"""Bars that need a GPU: compiled steps with [precision.graph] against autocast, and products in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.intervals import of_median
from benchmarks.timing import gpu_seconds

ROUNDS, CALLS = 11, 3
WIDE = 8192
"""Tokens, and inputs and outputs of each layer, of the matrix-bound model."""


def _speedup(plain: Callable[[], object], fast: Callable[[], object], note: str) -> Measured:
    """How many times faster one is than another, in rounds in which both take turns."""
    for work in (plain, fast):
        for _ in range(2):
            work()
    return of_median([gpu_seconds(plain, CALLS) / gpu_seconds(fast, CALLS) for _ in range(ROUNDS)], note)


def _stepping(model: Callable[[], Any], batch: Callable[[], Any], *features: Any) -> Callable[[], object]:
    import torch

    import shoestring as ss

    torch.manual_seed(0)
    with torch.device("cuda"):
        built, inputs = model(), batch()
    job = ss.Job(built, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, fused=True))
    ss.compose(job, [*features, ss.graph.Compile()])
    return partial(job.step, inputs)


def compiled(_: Deadline) -> Measured:
    """A compiled step of a decoder of 124 M parameters in bf16, by the pass against autocast."""
    import torch

    import shoestring as ss
    from shoestring.models.gpt import GPT, GPTConfig

    config = GPTConfig(vocab_size=50304, dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, context=1024)

    def batch() -> dict[str, Any]:
        tokens = torch.randint(50304, (16, 1024))
        return {"inputs": tokens, "targets": tokens.roll(-1, 1)}

    autocast = _stepping(lambda: GPT(config), batch, ss.precision.Autocast(dtype="bf16"))
    ours = _stepping(lambda: GPT(config), batch, ss.precision.Graph(dtype="bf16"))
    return _speedup(autocast, ours, "16,384 tokens, AdamW included")


def eight_bits(_: Deadline) -> Measured | NotRun:
    """A compiled step of four wide layers, whose time is that of products: 8 bits against bf16."""
    import torch
    from torch import nn

    import shoestring as ss
    from shoestring.precision.eight_bits import lacks_eight_bits

    if why := lacks_eight_bits(torch.device("cuda")):
        return NotRun(why)

    def model() -> Any:
        layers = [nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.SiLU()) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(WIDE, 1024, bias=False))

    def batch() -> tuple[Any, Any]:
        return torch.randn(WIDE, WIDE), torch.randint(1024, (WIDE,))

    sixteen = _stepping(model, batch, ss.precision.Graph(dtype="bf16"))
    eight = _stepping(model, batch, ss.precision.Graph(dtype="bf16", fp8=True))
    return _speedup(sixteen, eight, f"{WIDE} tokens, four layers of {WIDE} x {WIDE}, scales and AdamW included")


def rows() -> list[Bar]:
    """All bars that need a GPU."""

    def bar(name: str, what: str, limit: float, measure: Callable[[Deadline], Any], baseline: str) -> Bar:
        return Bar(f"precision.gpu-{name}", what, ">=", limit, measure, baseline, gpu=True)

    return [
        bar("compiled", "a compiled step by the pass, times as fast as autocast's", 1.05, compiled, "torch's autocast"),
        bar("fp8", "a compiled step of wide layers in 8 bits, times as fast as in bf16", 1.2, eight_bits, "bf16"),
    ]
