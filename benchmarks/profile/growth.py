"""How a profile grows with the length of a run: memory, its file, and how long it takes to end it."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Bar, Measured, run_command, stored
from benchmarks.machine import ROOT

SHORT, LONG, BESIDE = 100, 10_000, 300
MIB = 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def training() -> Callable[[], None]:
    """A step of a small model, of about 1,500 operators."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(8)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    batch = torch.randn(4, 16)

    def step() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours() -> dict[str, Any]:
    """Memory and file after few and many steps, and the seconds that the end took."""
    from shoestring.profile.collector import Collector

    step, found, early = training(), {}, 0
    for steps in (SHORT, LONG):
        collector = Collector()
        collector.start()
        for number in range(steps):
            step()
            if number == SHORT - 1:
                early = resident()
        grown = resident() - early
        began = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "profile.npz")
            collector.stop().profile().save(path)
            size = path.stat().st_size
        wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
        found[str(steps)] = {"grown": grown, "file": size, "end": wall, "end_processor": processor}
    return found


def torchs() -> dict[str, Any]:
    """The same of torch.profiler, with fewer steps."""
    step, before = training(), resident()
    with tempfile.TemporaryDirectory() as folder:
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profile.start()
        for _ in range(BESIDE):
            step()
        began = time.process_time()
        profile.stop()
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        size = path.stat().st_size
    return {"grown": resident() - before, "file": size, "end_processor": time.process_time() - began}


def apart(which: str) -> dict[str, Any]:
    """One of these in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    said = run_command([sys.executable, "-m", "benchmarks.profile.growth", which], cwd=ROOT, env=environment)
    return json.loads(said.strip().splitlines()[-1])


def rows(folder: Path, check: Callable[[], None]) -> list[Bar]:
    @cache
    def measured(which: str) -> dict[str, Any]:
        return stored(folder / f"{which}.json", check, partial(apart, which))

    def beside() -> str:
        theirs = measured("torchs")
        return (
            f"torch.profiler after {BESIDE} steps: {theirs['grown'] / MIB:.0f} MiB more, a trace of"
            f" {theirs['file'] / MIB:.0f} MiB, {theirs['end_processor']:.1f} s to end"
        )

    def growth() -> Measured:
        return Measured(measured("ours")[str(LONG)]["grown"] / MIB, beside())

    def size() -> Measured:
        return Measured(measured("ours")[str(LONG)]["file"] / 1e3, beside())

    def change() -> Measured:
        short, long = (measured("ours")[str(steps)]["file"] for steps in (SHORT, LONG))
        return Measured(abs(long / short - 1), f"{short} and {long} bytes")

    def end() -> Measured:
        found = measured("ours")
        both = ", ".join(f"{found[str(steps)]['end']:.3f} s after {steps} steps" for steps in (SHORT, LONG))
        return Measured(max(found[str(steps)]["end_processor"] for steps in (SHORT, LONG)), f"{both}; {beside()}")

    return [
        Bar(
            "profile.memory-growth",
            "MiB that a process with a profile grows from step 100 to step 10,000",
            "<=",
            1.0,
            lambda deadline: growth(),
        ),
        Bar("profile.file", "kB of a profile of 10,000 steps", "<=", 250.0, lambda deadline: size(), kind="exact"),
        Bar(
            "profile.file-change",
            "change of the size of the file from 100 to 10,000 steps",
            "<=",
            0.05,
            lambda deadline: change(),
            kind="exact",
        ),
        Bar(
            "profile.end",
            "processor seconds to stop and save a profile, after 100 or 10,000 steps",
            "<=",
            0.2,
            lambda deadline: end(),
        ),
    ]


if __name__ == "__main__":
    print(json.dumps({"ours": ours, "torchs": torchs}[sys.argv[1]]()))
