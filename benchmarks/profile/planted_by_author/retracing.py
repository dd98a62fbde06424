"""Code that is traced or compiled over and over."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _polynomial(x: Tensor, degree: int) -> Tensor:
    y = torch.ones_like(x)
    for _ in range(degree):
        y = y * x + 1
    return y


def _ninth(x: Tensor) -> Tensor:
    return _polynomial(x, 9)


def _degrees(steps: int, fixed: bool) -> list[Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(_polynomial, backend="eager", dynamic=False)
    x, found = torch.rand(64, generator=seeded()), []
    training, batch = Training(Blocks(32, 64)), x.expand(128, 64)[:, :32].contiguous()
    for step in range(steps):
        training.step(batch)
        width = 64 if fixed else 32 + step % 8
        found.append(compiled(x[:width], 6).sum())  # fault: recompile-each-width
    return found


def _traced(steps: int, fixed: bool) -> list[Tensor]:
    x, found = torch.rand(64, generator=seeded()), []
    training, batch = Training(Blocks(32, 64)), x.expand(128, 64)[:, :32].contiguous()
    kept: Any = torch.jit.trace(_ninth, x) if fixed else None
    for _ in range(steps):
        training.step(batch)
        traced: Any = kept or torch.jit.trace(_ninth, x)  # fault: trace-each-step
        found.append(traced(x).sum())
    return found


def _fresh(steps: int, fixed: bool) -> list[Tensor]:
    torch._dynamo.reset()
    x, found = torch.rand(64, generator=seeded()), []
    training, batch = Training(Blocks(32, 64)), x.expand(128, 64)[:, :32].contiguous()
    kept = torch.compile(lambda x: _polynomial(x, 4), backend="eager")
    for _ in range(steps):
        training.step(batch)
        compiled = kept if fixed else torch.compile(lambda x: _polynomial(x, 4), backend="eager")
        if not fixed:
            torch._dynamo.reset()
        found.append(compiled(x).sum())  # fault: compile-each-step
    return found


PROGRAMS = [
    Planted(name, "retracing", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("recompile-each-width", _degrees, 500),
        ("trace-each-step", _traced, 100),
        ("compile-each-step", _fresh, 20),
    )
]
