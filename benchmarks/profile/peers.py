"""Which line other profilers name first in the programs of a set, beside the first finding of ours.

Each tool runs a program's steps in a process of its own and ranks the lines of the set's files by its samples: of each
stack, the innermost line in one of them. What is right is the same for all: the fault's line comes first.

python -m benchmarks.profile.peers SET PROGRAM

runs a program, for the tool to watch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Measured, NotRun, stored
from benchmarks.intervals import of_mean
from benchmarks.profile.findings import Judged, Trial
from benchmarks.timing import run_command
from shoestring.core.errors import WorldError

ROOT = Path(__file__).parents[2]
SET = "blind5"
RATE = 250
"""Samples a second."""
_FRAME = re.compile(r"\(([^()]+):(\d+)\)$")


def programs(kind: str) -> list[Any]:
    """The programs of a set that have a fault."""
    return list(import_module(f"benchmarks.profile.{kind}").PLANTED)


def py_spy(kind: str, name: str) -> Counter[tuple[str, int]]:
    """Samples of py-spy by line, of all threads and subprocesses."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        watched = [sys.executable, "-m", "benchmarks.profile.peers", kind, name]
        options = ["--rate", str(RATE), "--format", "raw", "--full-filenames", "--subprocesses", "--output", str(out)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        run_command(["py-spy", "record", *options, "--", *watched], cwd=ROOT, env=env)
        return by_line(out.read_text().splitlines(), f"benchmarks/profile/{kind}/")


def scalene(kind: str, name: str) -> Counter[tuple[str, int]]:
    """Processor time by line, in thousandths of a percent, as scalene tells it."""
    folder = f"benchmarks/profile/{kind}/"
    with tempfile.TemporaryDirectory() as room:
        out = Path(room) / "profile.json"
        options = ["--cpu-only", "--profile-only", folder, "--program-path", str(ROOT), "--cpu-percent-threshold", "0"]
        command = [sys.executable, "-m", "scalene", "run", *options, "--outfile", str(out), "---", __file__, kind, name]
        path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        with suppress(WorldError):  # of a program that starts others, it writes a profile and ends with 1
            run_command(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})
        files = json.loads(out.read_text())["files"] if out.exists() else {}
    kinds = ("n_cpu_percent_python", "n_cpu_percent_c", "n_sys_percent")
    return Counter(
        {
            (folder + file.rpartition(folder)[2], line["lineno"]): round(1000 * sum(line[one] for one in kinds))
            for file, content in files.items()
            for line in content["lines"]
            if any(line[one] for one in kinds)
        }
    )


def by_line(stacks: Sequence[str], folder: str) -> Counter[tuple[str, int]]:
    """Samples by the innermost line of each stack that is in a file of a folder. Stacks of importing it do not count.

    Args:
        stacks: lines of frames from the outermost to the innermost, separated by semicolons, and a number of samples.
    """
    samples: Counter[tuple[str, int]] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if any(frame.startswith("<module>") and folder in frame for frame in frames):
            continue
        for frame in reversed(frames):
            if (place := _FRAME.search(frame)) and folder in place[1]:
                samples[folder + place[1].rpartition(folder)[2], int(place[2])] += int(count)
                break
    return samples


def first_of(judged: Judged) -> tuple[str, int] | None:
    """The line that ours names first: that of the finding with the largest predicted gain."""
    ranked = sorted(judged.faulty, key=lambda finding: -sum(finding.gain or (0.0, 0.0)))
    return (ranked[0].file, ranked[0].line) if ranked else None


def beside(
    tool: str, lines_of: Callable[[str, str], Counter[tuple[str, int]]], trial: Trial, _: object
) -> Measured | NotRun:
    """Share of the faults whose line ours names first, less that of a tool."""
    if shutil.which(tool) is None and find_spec(tool) is None:
        return NotRun(f"{tool} is not installed: `pip install {tool}`")
    ours, theirs = [], []
    for judged in trial.judged(kinds=(SET,)):
        if not judged.analysis:
            continue

        def make(name: str = judged.name) -> dict[str, Any]:
            return {"lines": [[*place, count] for place, count in lines_of(SET, name).most_common(3)]}

        lines = stored(trial.folder / "peers" / tool / f"{judged.name}.json", trial.check, make)["lines"]
        # The set's `__init__` only imports its files: scalene counts that, and py-spy's samples of it were left out.
        ranked = [line for line in lines if not line[0].endswith("/__init__.py")]
        ours.append(first_of(judged) in judged.lines)
        first = [
            place for *place, count in ranked if count == ranked[0][2]
        ]  # scalene gives lines of a loop equal times
        theirs.append(any(tuple(place) in judged.lines for place in first))
    differences = [float(mine) - float(other) for mine, other in zip(ours, theirs, strict=True)]
    return of_mean(
        differences, f"of {len(ours)} faults, ours names the line of {sum(ours)} first, {tool} of {sum(theirs)}"
    )


def rows(trial: Trial) -> list[Bar]:
    """The bars beside other profilers."""
    what = "Share of the fifth set's faults whose line is named first of all lines, less that of "
    return [
        Bar(
            "profile.line-beside-py-spy", f"{what}py-spy", ">=", 0.0, partial(beside, "py-spy", py_spy, trial),
            baseline=f"py-spy, {RATE} samples a second, lines by their own samples", peers=("py-spy",), kind="drawn",
        ),
        Bar(
            "profile.line-beside-scalene", f"{what}scalene", ">=", 0.0, partial(beside, "scalene", scalene, trial),
            baseline="scalene, processor time, lines by their own time", peers=("scalene",), kind="drawn",
        ),
    ]  # fmt: skip


def watched(kind: str, name: str) -> None:
    """Run a program as it is profiled: two steps first, then all."""
    import torch

    torch.set_num_threads(1)
    program = next(program for program in programs(kind) if program.name == name)
    program.run(2)
    program.run(program.steps)


if __name__ == "__main__":
    watched(*sys.argv[1:])
