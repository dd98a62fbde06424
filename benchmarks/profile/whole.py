"""What a profile costs a whole program, from its start to the file that the tool leaves, beside other tools.

A program trains one of the workloads for some seconds. It runs as itself, within `profiled()`, within torch.profiler,
and under tools that start it. The processor time of all its processes counts, that of the tool too.

python -m benchmarks.profile.whole MODE WORKLOAD STEPS FILE

runs the program in a mode of its own: `plain`, `ours`, `torch` or `stacks`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.calm import was_calm
from benchmarks.harness import Bar, Measured, NotRun, stored
from benchmarks.intervals import of_median
from benchmarks.machine import ROOT
from benchmarks.timing import commands_cpu_time, run_command

STEPS: Mapping[str, int] = {"gpt": 30, "dlrm": 100, "conformer": 30}
"""Steps of a program: some seconds of processor time."""
ROUNDS = 8
OWN = ("plain", "ours", "torch", "stacks")
"""Modes in which the program profiles itself, or does not."""
Command = Callable[[Sequence[str], Path], list[str]]
"""(arguments after `python`, file to write) -> command."""
WRAPPED: Mapping[str, Command] = {
    "py-spy": lambda program, out: ["py-spy", "record", "--output", f"{out}.svg", "--", sys.executable, *program],
    "scalene": lambda program, out: [
        *(sys.executable, "-m", "scalene", "run", "--cpu-only", "--program-path", str(ROOT), "--outfile", str(out)),
        *("---", *program[1:]),
    ],
    "memray": lambda program, out: [sys.executable, "-m", "memray", "run", "--output", str(out), *program],
}
"""Tools that start a program."""
TOLD = {"torch": "torch.profiler", "stacks": "torch.profiler with stacks"}
"""What a mode is called where its name does not say it."""


def missing(mode: str) -> str:
    """Why a mode cannot run here; empty if it can."""
    there = mode in OWN or (shutil.which(mode) if mode == "py-spy" else find_spec(mode))
    return "" if there else f"{mode} is not installed: `pip install {mode}`"


def seconds(mode: str, workload: str) -> float:
    """Processor seconds of a program in a mode, and of the tool, from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile"
        own = mode if mode in OWN else "plain"
        program = ["-m", "benchmarks.profile.whole", own, workload, str(STEPS[workload]), str(out)]
        if mode == "scalene":  # it takes files
            program = ["", str(Path(__file__)), *program[2:]]
        command = WRAPPED[mode](program, out) if mode in WRAPPED else [sys.executable, *program]
        path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        began = commands_cpu_time()
        run_command(command, cwd=ROOT, env=env)
        return commands_cpu_time() - began


def rounds_of(workload: str, modes: Sequence[str], check: Callable[[], None]) -> dict[str, list[float]]:
    """Processor seconds of each mode in each round, in turns."""
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    was_calm()
    while len(found["plain"]) < ROUNDS:
        check()
        order = list(modes)[:: 1 if len(found["plain"]) % 2 else -1]
        taken = {mode: seconds(mode, workload) for mode in order}
        if was_calm():
            for mode, value in taken.items():
                found[mode].append(value)
    return found


class Programs:
    """The seconds of all modes, measured once and stored by workload.

    Args:
        folder: folder of what was measured.
        check: raises an error when the time is up.
    """

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        self.folder, self.check = folder, check

    def of(self, workload: str) -> dict[str, Any]:
        modes = [mode for mode in (*OWN, *WRAPPED) if not missing(mode)]
        name = self.folder / f"{workload}.json"
        return stored(name, self.check, partial(rounds_of, workload, modes, self.check))

    def over(self, mode: str) -> Measured | NotRun:
        """Seconds with `profiled()` over those in another mode, the geometric mean over workloads of each round."""
        if reason := missing(mode):
            return NotRun(reason)
        times = {name: self.of(name) for name in STEPS}
        logs = [
            [math.log(ours / theirs) for ours, theirs in zip(one["ours"], one[mode], strict=True)]
            for one in times.values()
        ]
        ratios = [math.exp(sum(of_round) / len(of_round)) for of_round in zip(*logs, strict=True)]
        told = ", ".join(f"{name} {sum(one['ours']) / sum(one[mode]):.2f}" for name, one in times.items())
        return of_median(ratios, told)


def rows(programs: Callable[[], Programs]) -> list[Bar]:
    """The bars of whole programs."""
    what = "processor seconds of a whole program within `profiled()`, written and shown, over those {}; three workloads"
    return [
        Bar(
            "profile.whole", what.format("without a profile"), "<=", 1.1, lambda _: programs().over("plain"),
            baseline="the same program without a profile",
        ),
        *(
            Bar(
                f"profile.whole-{mode}", what.format(f"under {TOLD.get(mode, mode)}"), "<=", 1.0,
                lambda _, mode=mode: programs().over(mode),
                baseline=TOLD.get(mode, mode), peers=(mode,) if mode in WRAPPED else (),
            )
            for mode in ("torch", "stacks", *WRAPPED)
        ),
    ]  # fmt: skip


def program(mode: str, name: str, steps: int, out: Path) -> None:
    """Train a workload in a mode."""
    import torch

    from benchmarks.profile.workloads import build
    from shoestring.profile import profiled

    torch.set_num_threads(1)
    workload = build(name)

    def train() -> None:
        for _ in range(steps):
            workload.step()

    if mode == "plain":
        train()
    elif mode == "ours":
        with profiled(out) as recorded:
            train()
        print(recorded)
    else:
        with torch.profiler.profile(with_stack=mode == "stacks") as record:
            train()
        record.export_chrome_trace(str(out))


if __name__ == "__main__":
    mode, name, steps, out = sys.argv[1:]
    program(mode, name, int(steps), Path(out))
