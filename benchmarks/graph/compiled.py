"""What torch.compile gains in a step of a job, and what the first step costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

import shoestring as ss
from benchmarks.graph.models import Case, Shape, gpt, resnet_case, text_case
from benchmarks.harness import Bar, Deadline
from benchmarks.rows import Measured
from benchmarks.timing import paired

ROUNDS, WARMUP = 12, 2
TIMED: dict[str, Case] = {
    "gpt": text_case(gpt, Shape(4, dim=256, tokens=64, batch=8)),
    "resnet50": resnet_case(16, 64, 100, batch=8),
}


def step_of(case: Case, *features: ss.Feature) -> Callable[[], object]:
    """A step of a job on one batch."""
    torch.manual_seed(0)
    model, (inputs, targets) = case.prepare()(), case.batch()
    job = ss.compose(ss.Job(model, optimizer=partial(torch.optim.AdamW, lr=1e-4)), features)
    batch = {"inputs": inputs, "targets": targets}
    return lambda: job.step(batch)


def gain(name: str, deadline: Deadline) -> Measured:
    """Seconds of a compiled step over those of a step that is not compiled."""
    plain, compiled = step_of(TIMED[name]), step_of(TIMED[name], ss.graph.Compile())
    began = time.perf_counter()
    compiled()
    first = time.perf_counter() - began
    deadline.check()
    pairs = paired(compiled, plain, rounds=ROUNDS, warmup=WARMUP)
    return pairs.measured(f"{pairs}; the first step took {first:.1f} s")


def rows() -> list[Bar]:
    """The bars of compilation."""
    what = "seconds of a step compiled by inductor over those of one that is not"
    return [
        Bar(f"graph.compile-{name}", f"{name}: {what}", "<=", 1.0, partial(gain, name), "eager", kind="timed")
        for name in TIMED
    ]
