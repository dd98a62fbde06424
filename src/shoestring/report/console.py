"""The progress of a run: a bar on a terminal, lines elsewhere; both show the same figures."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from shoestring.report import figures

_FACTS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("loss", lambda value: f"loss {value:.3f}"),
    ("bits_per_byte", lambda value: f"bpb {value:.2f}"),
    ("held_out_loss", lambda value: f"held-out loss {value:.3f}"),
    ("held_out_bits_per_byte", lambda value: f"held-out bpb {value:.3f}"),
    ("lr", lambda value: f"lr {figures.rate(value)}"),
    ("tokens_per_second", lambda value: f"{figures.count(value)} tok/s"),
    ("samples_per_second", lambda value: f"{figures.count(value)} samples/s"),
    ("mfu", lambda value: f"mfu {figures.percent(value)}"),
    ("memory_gib", lambda value: f"{value:.2f} GiB"),
    ("data_wait", lambda value: f"data {figures.percent(value)}"),
)
_EVALUATION = ("held_out_loss", "held_out_bits_per_byte")


class Console:
    """A sink that shows each step to a person.

    On a terminal a progress bar; otherwise a line for the first step, for the last, for each evaluation, and of the
    others those that `every` divides, at most one each `pause` seconds. `NO_COLOR` and a dumb terminal are honoured.

    Args:
        total: gives the steps of the whole run, those before a resume included; 0 while they are not known.
        every: lines only for multiples of this; 1 for all.
        pause: seconds that must pass between two ordinary lines.
        stream: where to write; standard error when None.
        clock: seconds that only grow; what pauses and the time left are measured with.
    """

    def __init__(
        self,
        total: Callable[[], int],
        *,
        every: int = 1,
        pause: float = 1.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._every, self._pause, self._clock = total, max(every, 1), pause, clock
        self._stream = sys.stderr if stream is None else stream
        self._begun: tuple[int, float] | None = None
        self._printed = float("-inf")
        self._held_back = ""
        on_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = _Bar(self._stream) if on_terminal else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show `values` (the keys of metrics.jsonl) of `step`, counted from 1."""
        now, total = self._clock(), self._total()
        first = self._begun is None
        self._begun = self._begun or (step, now)
        facts, left = _facts(values), self._left(step, now)
        line = " | ".join([f"step {step}/{total or '?'}", *facts, *left])
        evaluated = any(key in values for key in _EVALUATION)
        if self._bar:
            # the time left comes first, because a narrow terminal cuts off the end
            self._bar.show(step, total, " | ".join(left + facts), line if evaluated else "")
        elif first or evaluated or 0 < total <= step or self._due(step, now):
            self._print(line, now)
        else:
            self._held_back = line

    def close(self) -> None:
        """Show the last step if it was held back, and take the bar down, its last state left standing."""
        if self._bar:
            self._bar.close()
        elif self._held_back:
            self._print(self._held_back, self._clock())

    def _due(self, step: int, now: float) -> bool:
        return step % self._every == 0 and now - self._printed >= self._pause

    def _print(self, line: str, now: float) -> None:
        print(line, file=self._stream, flush=True)
        self._printed, self._held_back = now, ""

    def _left(self, step: int, now: float) -> list[str]:
        """The time left at the mean pace since this process's first step, including evaluations and checkpoints."""
        begun_step, begun = self._begun or (step, now)
        total = self._total()
        if step <= begun_step or step >= total:
            return []
        return [f"eta {figures.duration((now - begun) / (step - begun_step) * (total - step))}"]


class _Bar:
    """The facts beside a bar that takes what room they leave; evaluations stay above it as lines."""

    def __init__(self, stream: TextIO) -> None:
        columns = (
            TextColumn("{task.fields[steps]}", markup=False, table_column=Column(no_wrap=True, min_width=9)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4, max_width=30)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        )
        self._progress = Progress(*columns, console=RichConsole(file=stream), expand=True)
        self._task = self._progress.add_task("", total=None, steps="")
        self._progress.start()

    def show(self, step: int, total: int, facts: str, line: str) -> None:
        if line:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        steps = f"{step}/{total or '?'}"
        self._progress.update(self._task, completed=step, total=total or None, description=facts, steps=steps)

    def close(self) -> None:
        self._progress.stop()


def _facts(values: Mapping[str, float]) -> list[str]:
    return [show(float(values[key])) for key, show in _FACTS if key in values]
