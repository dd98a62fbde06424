"""Seconds of a step on hosts that slow links connect: pipelines, DDP, 4-bit gradients, local steps."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from benchmarks.harness import Bar, Deadline
from benchmarks.intervals import of_median
from benchmarks.parallel.quotas import processor_quotas
from benchmarks.restart import share
from benchmarks.rows import Measured, NotRun
from shoestring.testing.netlab import netlab, netlab_available
from tests.rigs.lab_run import replaced

BLOCKS, ROUNDS = 9, 5
OURS = "pipeline-16"
MAIN, OTHERS = ("ddp", "4bit"), ("local", "interleaved-16", "gpipe-16")
"""Methods beside ours, by launch."""
TIMEOUT = 1800.0


@cache
def measured(hosts: int, rate: str, others: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of a step by method, ours among them, block by block."""
    with tempfile.TemporaryDirectory() as folder, processor_quotas(hosts) as group:
        out = Path(folder) / "seconds.json"
        with netlab(hosts=hosts, rate=rate) as lab:
            command = ["-m", "benchmarks.parallel.worker", str(out), str(BLOCKS), group, OURS, *others]
            program = lab.torchrun(command, env={"OMP_NUM_THREADS": "1"})
            try:
                program.check(timeout=TIMEOUT)
            finally:
                program.kill()
        return json.loads(out.read_text())["seconds"]


def gain(hosts: int, rate: str, other: str, deadline: Deadline) -> Measured | NotRun:
    """How many times as long a step of another method takes."""
    if reason := netlab_available():
        return NotRun(reason)
    deadline.check()
    seconds = measured(hosts, rate, MAIN if other in MAIN else OTHERS)
    ratios = [theirs / own for theirs, own in zip(seconds[other], seconds[OURS], strict=True)]
    medians = ", ".join(f"{name} {statistics.median(values):.3g} s" for name, values in seconds.items())
    return of_median(ratios, f"medians of {BLOCKS} blocks: {medians}")


def rows() -> list[Bar]:
    """The bars of speed."""

    def bar(name: str, hosts: int, other: str, least: float, what: str) -> Bar:
        measure: Callable[..., Measured | NotRun] = partial(gain, hosts, "20mbit", other)
        told = f"step of {what} over one of a pipeline of as many stages; GPT of 7.5 M weights, 2,048 tokens a step"
        return Bar(f"parallel.{name}", f"{told}, {hosts} hosts at 20 Mbit/s", ">=", least, measure, baseline=what)

    lost = (
        "two hosts at 100 Mbit/s, each a stage, of which one is lost with memory and disk and replaced, end with the "
        f"losses of two local stages: share of {ROUNDS} rounds"
    )
    return [
        Bar(
            "parallel.stage-lost",
            lost,
            ">=",
            1.0,
            partial(share, replaced, ROUNDS, pipeline=True),
            kind="exact",
        ),
        bar("fast-2-ddp", 2, "ddp", 1.8, "DDP"),
        bar("fast-2-4bit", 2, "4bit", 1.1, "4-bit gradients (lossy)"),
        bar("fast-4-ddp", 4, "ddp", 2.5, "DDP"),
        bar("fast-2-local", 2, "local", 1.0, "local steps, merged every 8 (another result)"),
        bar("fast-4-local", 4, "local", 1.0, "local steps, merged every 8 (another result)"),
        bar("fast-2-interleaved", 2, "interleaved-16", 1.0, "an interleaved pipeline of two parts a stage"),
        bar("fast-4-interleaved", 4, "interleaved-16", 1.0, "an interleaved pipeline of two parts a stage"),
        bar("fast-2-gpipe", 2, "gpipe-16", 1.0, "a pipeline that runs all forward passes first"),
    ]
