"""What a planted program is, and what counts as right for each analysis.

A program is real code of a usual kind with one fault and a twin that computes the same without it. The fault's line
ends with the comment `# fault: NAME`. Where a fault spans several lines (a chain, a loop), each of them has the
comment, and an analysis is right if the first place it names is any of them.

hotspot: the line of user code with the largest time, forward and backward together; more than half of all time.
fusible: any line of the chain of small operators that one operator, or fewer, can replace.
optimizer: the line that updates parameters one by one: `optimizer.step()`, or the lines of a loop of one's own.
imbalance: the line of the forward pass whose gradient takes far longer than gradients of its operators usually do.
synchronization: the line in a loop that takes a value out of a tensor each time.
loading: the line that waits for the next batch, or the line of the data set that makes the wait.
layout: a line that converts layout or data type, where a later one converts back.
retracing: the call that traces or compiles again, or the line in compiled code that breaks the graph.
communication: the line that waits for communication which could have been hidden or saved.

A twin is without the fault of its program: what its own analysis finds in it is a false alarm. The clean programs are
without any of the nine, and whatever is found in them is a false alarm; no line takes more than half of their time.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Analysis = Literal[
    "hotspot",
    "fusible",
    "optimizer",
    "imbalance",
    "synchronization",
    "loading",
    "layout",
    "retracing",
    "communication",
    "python",
    "unjitted",
    "copies",
    "recomputation",
    "evaluation",
    "threads",
    "growth",
    "drift",
]

Run = Callable[[int], Any]
"""Runs a number of steps and returns numbers: arrays, tensors, or lists of them."""


@dataclass(frozen=True)
class Clean:
    """A program without any of the nine faults."""

    name: str
    run: Run
    steps: int
    """How many make 0.3 to 2 seconds of CPU time."""
    framework: str = "torch"


@dataclass(frozen=True)
class Planted:
    """A program with a fault, and its twin without it."""

    name: str
    analysis: Analysis
    run: Run
    fixed: Run
    steps: int
    """How many make 0.3 to 2 seconds of CPU time, or of waiting."""
    module: str
    """Where the fault is."""
    framework: str = "torch"
    clock: Callable[[], float] = time.process_time
    """What the fix saves: CPU time, or with `time.perf_counter` waiting."""

    @property
    def lines(self) -> list[tuple[str, int]]:
        """File and number of each line that has the fault."""
        import importlib

        file = inspect.getsourcefile(importlib.import_module(self.module))
        assert file is not None
        mark = re.compile(rf"# fault: {re.escape(self.name)}\b(?!-)")
        numbered = enumerate(Path(file).read_text().splitlines(), 1)
        return [(file, number) for number, line in numbered if mark.search(line)]


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own, so that programs do not depend on what ran before."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def weights(model: torch.nn.Module) -> list[Tensor]:
    """Copies of all parameters, as the result of a training."""
    return [parameter.detach().clone() for parameter in model.parameters()]


FAULTS = (
    "hotspot",
    "fusible",
    "optimizers",
    "imbalance",
    "synchronization",
    "loading",
    "layout",
    "retracing",
    "communication",
)
"""Modules of a set's programs, one for each of the first nine analyses."""


def programs(package: str, modules: Iterable[str]) -> list[Any]:
    """Those of some modules of a package, in order."""
    return [program for name in modules for program in import_module(f"{package}.{name}").PROGRAMS]
