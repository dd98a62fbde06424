"""Bars of `memory.zero`: equal to DDP, its bytes, its memory and its time beside FSDP2 and DeepSpeed, resuming."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured, NotRun, run_command
from benchmarks.intervals import of_median
from shoestring.testing.netlab import netlab, netlab_available

WORKER, CHECKS = "benchmarks.memory.zero_worker", "benchmarks.memory.zero_checks"
RANKS, TIMEOUT = 4, 1200.0
PEERS = ("ddp", "fsdp", "deepspeed")


def on_loopback(module: str, ranks: int, *arguments: str, folder: Path | None = None) -> dict[str, Any]:
    """What ranks on this host find."""
    with tempfile.TemporaryDirectory() as fresh:
        out = (folder or Path(fresh)) / "out.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        torchrun.append(f"--log-dir={fresh}")
        run_command([*torchrun, "-m", module, str(out), *arguments])
        return json.loads(out.read_text())


def on_hosts(rate: str | None, *arguments: str, ranks: int = RANKS) -> dict[str, Any]:
    """What ranks find that each have a virtual host, with links of this rate."""
    with tempfile.TemporaryDirectory() as folder, netlab(hosts=ranks, rate=rate, shared=Path(folder)) as lab:
        from shoestring.testing.netlab import SHARED

        job = lab.torchrun(["-m", WORKER, str(SHARED / "out.json"), *arguments])
        job.check(timeout=TIMEOUT)
        return json.loads((Path(folder) / "out.json").read_text())


# -- what is computed -------------------------------------------------------------------------------------------------


@cache
def _equal() -> dict[str, Any]:
    return on_loopback(CHECKS, 2, "equal")


def differing(case: str, what: str, _: Deadline) -> Measured:
    """The largest difference from DDP in 50 steps."""
    found = _equal()[case]
    note = f"losses differ by {found['loss']:.2g}, weights by {found['weights']:.2g}"
    if "clipped" in case:
        note += "; on a CPU torch's float32 norm of a whole tensor is off by up to 8e-6, that of its shards by less"
    return Measured(found[what], note)


def resuming(_: Deadline) -> Measured:
    """Tensors of the state that differ after a resume on one and on three ranks, of what two ranks saved."""
    with tempfile.TemporaryDirectory() as name:
        saved = on_loopback(CHECKS, 2, "save", folder=Path(name))
        resumed = [on_loopback(CHECKS, ranks, "resume", folder=Path(name)) for ranks in (1, 3)]
    differing = sum(saved[name] != again[name] for again in resumed for name in saved)
    return Measured(differing, f"of {len(saved)} tensors, on 1 and on 3 ranks")


# -- what it takes ----------------------------------------------------------------------------------------------------


def sending(_: Deadline) -> Measured | NotRun:
    """Bytes that leave a host's interface in a step, as a part of what they must be."""
    if reason := netlab_available():
        return NotRun(reason)
    found = on_hosts(None, "--methods=zero", "--steps=4", "--rounds=2")
    needed = 2 * 4 * found["parameters"] * (RANKS - 1) / RANKS
    sent = statistics.fmean(found["zero"]["bytes"])
    return Measured(sent / needed, f"{sent / 1e6:.1f} MB a step on {RANKS} hosts, unshaped: frames of up to 64 kB")


def holding(ranks: int, _: Deadline) -> Measured:
    """The most bytes allocated, as a part of 2 P + 14 P / N."""
    found = on_loopback(CHECKS, ranks, "state")
    needed = (2 + 14 / ranks) * found["parameters"]
    return Measured(found["most"] / needed, f"{found['most'] / 1e6:.1f} MB for {found['parameters'] / 1e6:.1f} M")


@cache
def _times(rate: str | None) -> dict[str, Any]:
    methods = [*PEERS[:2], "zero", *(["deepspeed"] if find_spec("deepspeed") else [])]
    arguments = (f"--methods={','.join(methods)}", "--steps=2", "--rounds=6")
    return on_hosts(rate, *arguments) if rate else on_loopback(WORKER, RANKS, *arguments)


def timing(peer: str, rate: str | None, _: Deadline) -> Measured | NotRun:
    """Median over the rounds of the step time as a part of a peer's, which ran right beside it."""
    if peer == "deepspeed" and not find_spec("deepspeed"):
        return NotRun("deepspeed is not installed")
    if rate and (reason := netlab_available()):
        return NotRun(reason)
    found = _times(rate)
    ratios = sorted(a / b for a, b in zip(found["zero"]["seconds"], found[peer]["seconds"], strict=True))
    seconds = statistics.median(found["zero"]["seconds"])
    return of_median(ratios, f"{ratios[0]:.2f} to {ratios[-1]:.2f} in 6 rounds; {seconds:.2f} s a step")


def rows() -> list[Bar]:
    """All bars of this part."""

    def bar(name: str, what: str, limit: float, measure: Callable[[Deadline], Any], **more: Any) -> Bar:
        return Bar(f"memory.zero.{name}", what, "<=", limit, measure, **more)

    two = "fp32, two ranks, 50 steps, tied and frozen parameters"
    found = [
        bar("equal", f"largest difference of a weight from DDP's: {two}", 0, partial(differing, "stage 2", "weights")),
        bar("equal-accumulated", f"the same with two micro-batches a step, stage 1: {two}", 0,
            partial(differing, "stage 1, accumulated", "weights")),
        bar("accumulated-in-shards", f"relative difference of a loss from DDP's with two micro-batches, stage 2: {two}",
            1e-6, partial(differing, "stage 2, accumulated", "loss")),
        bar("clipped", f"relative difference of a loss from DDP's with clipping: {two}", 1e-6,
            partial(differing, "stage 2, clipped", "loss")),
        bar("resumed", "tensors of the state that differ after a resume on another number of ranks", 0, resuming),
        bar("bytes", "bytes that leave an interface a step, of 2 P (N - 1) / N", 1.02, sending),
        *(bar(f"state-{ranks}", f"bytes allocated at the peak, of 2 P + 14 P / N: bf16, float32 masters, {ranks} ranks",
              1.03, partial(holding, ranks)) for ranks in (2, 4)),
    ]  # fmt: skip
    found = [replace(one, kind="exact") for one in found]
    for where, rate in (("1gbit", "1gbit"), ("loopback", None)):
        for peer in ("fsdp", "deepspeed"):
            what = (
                f"seconds a step, of {'FSDP2' if peer == 'fsdp' else 'DeepSpeed'}'s: 11 M parameters, 4 ranks, {where}"
            )
            peers = ("deepspeed",) if peer == "deepspeed" else ()
            found.append(bar(f"time-{peer}-{where}", what, 1.0, partial(timing, peer, rate), peers=peers))
    return found
