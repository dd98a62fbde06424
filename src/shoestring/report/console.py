"""Shows the progress of a run: as a bar on a terminal, elsewhere as lines; both have the same figures."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from shoestring import figures

_FACTS: tuple[tuple[str, Callable[[float], str]], ...] = (  # metrics and their formats, most important first
    ("loss", lambda value: f"loss {value:.3f}"),
    ("bits_per_byte", lambda value: f"bpb {value:.2f}"),
    ("held_out_loss", lambda value: f"held-out loss {value:.3f}"),
    ("held_out_bits_per_byte", lambda value: f"held-out bpb {value:.3f}"),
    ("lr", lambda value: f"lr {figures.rate(value)}"),
    ("tokens_per_second", lambda value: f"{figures.count(value)} tok/s"),
    ("samples_per_second", lambda value: f"{figures.count(value)} samples/s"),
    ("mfu", lambda value: f"mfu {figures.percent(value)}"),
    ("memory_gib", lambda value: figures.memory(value * 2**30)),
    ("data_wait", lambda value: f"waits for data {figures.percent(value)}" if value >= 0.01 else ""),
)
_EVALUATION = ("held_out_loss", "held_out_bits_per_byte")


class Console:
    """A sink that shows the progress of a run to users.

    On a terminal, it draws a progress bar. Otherwise, it prints a line for the first step, the last step and each
    evaluation, and for other steps whose number is a multiple of `every`, at most one line per `pause` seconds.
    `NO_COLOR` and `TERM=dumb` are honoured.

    Args:
        total: returns the number of steps of the whole run, including steps before a resume; 0 while it is unknown.
        every: print only steps whose numbers are multiples of this; 1 allows all steps.
        pause: minimum number of seconds between two ordinary lines.
        stream: where to write; standard error if None.
        clock: monotonic clock in seconds, for `pause` and for the time left.
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
        """Show the metrics of a step; steps count from 1, and the keys are the same as in metrics.jsonl."""
        now, total = self._clock(), self._total()
        first = self._begun is None
        self._begun = self._begun or (step, now)
        facts = [text for key, show in _FACTS if key in values and (text := show(float(values[key])))]
        left = self._left(step, now)
        line = " | ".join([f"step {step}/{total or '?'}", *facts, *left])
        evaluated = any(key in values for key in _EVALUATION)
        due = step % self._every == 0 and now - self._printed >= self._pause
        if self._bar:
            # The remaining time comes first, because a narrow terminal cuts off the end.
            self._bar.show(step, total, " | ".join(left + facts), line if evaluated else "")
        elif first or evaluated or 0 < total <= step or due:
            self._print(line, now)
        else:
            self._held_back = line

    def close(self) -> None:
        """Print the last step if its line was held back, or stop the bar, whose last state stays on the screen."""
        if self._bar:
            self._bar.close()
        elif self._held_back:
            self._print(self._held_back, self._clock())

    def _print(self, line: str, now: float) -> None:
        print(line, file=self._stream, flush=True)
        self._printed, self._held_back = now, ""

    def _left(self, step: int, now: float) -> list[str]:
        """Estimate the remaining time from the mean time per step since this process began, evaluations included."""
        begun_step, begun = self._begun or (step, now)
        total = self._total()
        if step <= begun_step or step >= total:
            return []
        return [f"eta {figures.duration((now - begun) / (step - begun_step) * (total - step))}"]


class _Bar:
    """A progress bar beside the figures of the newest step; evaluations are printed as lines above the bar."""

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
