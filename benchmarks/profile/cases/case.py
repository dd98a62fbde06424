"""What a case study is: a program, the same program with the change, and how much faster it is."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

from benchmarks.timing import Paired, paired

ROUNDS = 8

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A program whose steps are measured before and after a change."""

    name: str
    before: Callable[[], Step]
    """Builds the program, and gives what makes one step of it."""
    after: Callable[[], Step]
    steps: int
    """Of one measurement; they make 0.2 to 1 second of processor time."""
    packages: tuple[str, ...] = ()
    """That it needs besides those of the development environment."""

    def measure(self) -> Paired:
        """Processor time before over that after, in one process, in alternation."""
        import time

        import torch

        torch.set_num_threads(1)
        old, new = self.before(), self.after()
        return paired(
            partial(repeated, old, self.steps),
            partial(repeated, new, self.steps),
            rounds=ROUNDS,
            warmup=1,
            order="AB",
            clock=time.process_time,
        )


def repeated(step: Step, steps: int) -> None:
    for _ in range(steps):
        step()


def with_changes(step: Step, owner: Any, **values: Any) -> Step:
    """The step while names of a module or class have other values."""

    def changed() -> object:
        with patch.multiple(owner, **values):
            return step()

    return changed


def rewritten(module: ModuleType, function: Callable[..., object], *changes: tuple[str, str]) -> Callable[..., object]:
    """A function of an installed package with parts of its source replaced.

    Raises:
        ValueError: the installed version does not have one of the parts.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    source = source[source.index("def ") :]
    for old, new in changes:
        if old not in source:
            raise ValueError(f"{module.__name__}: there is no `{old}` in `{function.__qualname__}`")
        source = source.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(source, module.__file__ or "", "exec"), vars(module), names)  # names of the module are its globals
    return names[function.__name__]
