"""Shows the progress of a study: on a terminal as a live table, elsewhere as one line per ended trial."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoestring import figures
from shoestring.storage.foreign import one_line
from shoestring.tune.store import ENDED, TrialLease
from shoestring.tune.view.record import StudyRecord

_ROWS = 16


class StudyProgress:
    """A context that shows the progress of a study; may be used from any thread.

    Args:
        read: function that reads the study's current state; if it raises an error, the display does not change.
        steps: number of steps of a trial; infinite if unknown.
        every: seconds between two updates.
    """

    def __init__(
        self, read: Callable[[], StudyRecord], steps: float, *, every: float = 2.0, stream: TextIO | None = None
    ) -> None:
        self._read, self._steps, self._every = read, steps, every
        self.console = Console(file=stream, stderr=stream is None, highlight=False, soft_wrap=True)
        self._live = Live(console=self.console, refresh_per_second=2) if self.console.is_terminal else None
        self._told: set[int] = set()
        self._end, self._thread = threading.Event(), threading.Thread(target=self._follow, daemon=True)

    @property
    def drawn(self) -> bool:
        """Whether a live table is drawn, in which case nothing else should write to the terminal."""
        return self._live is not None

    def look(self) -> None:
        """Update the table, or print the trials that have ended since the last call."""
        try:
            record = self._read()
        except Exception:  # workers report that the store does not respond
            return
        if self._live is not None:
            self._live.update(drawing(record, self._steps))
            return
        for trial in record.trials:
            if trial.state in ENDED and trial.number not in self._told:
                self._told.add(trial.number)
                self.console.print(Text(one_line(ending(record, trial))))

    def _follow(self) -> None:
        while not self._end.wait(self._every):
            self.look()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        self.look()
        if self._live is not None:
            self._live.stop()


def headline(record: StudyRecord) -> str:
    """Describe the state of a study in one line."""
    states = [trial.state for trial in record.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no trials yet"
    best = record.ranked[:1]
    result = "".join(f"; best {figures.plain(trial.value or 0.0)} (trial {trial.number})" for trial in best)
    return f"{record.study.name}: {counts}{result}; {record.hours:.2f} h of work"


def ending(record: StudyRecord, trial: TrialLease) -> str:
    """Describe in one line how a trial ended."""
    result = "" if trial.value is None else f", {record.study.objective} {figures.plain(trial.value)}"
    best = " (best so far)" if record.ranked and record.ranked[0].number == trial.number else ""
    note = f": {trial.note}" if trial.note else ""
    return f"trial {trial.number} {trial.state}{note}{result}{best}; {len(record.done)} results"


def drawing(record: StudyRecord, steps: float) -> Table:
    """Make a table with the headline, the running trials, and the best results."""
    table = Table(title=Text(headline(record)), title_justify="left", expand=True)
    for column in ("Trial", "State", "Step", record.study.objective, "Settings"):
        table.add_column(Text(column), overflow="fold")
    unfinished = [trial for trial in record.trials if trial.state in ("held", "ready", "paused")]
    unfinished.sort(key=lambda trial: (trial.state != "held", trial.number))  # running trials first
    for trial in [*unfinished, *record.ranked][:_ROWS]:
        reports = record.reports.get(trial.trial, {})
        value = trial.value if trial.value is not None else reports[max(reports)] if reports else None
        step = f"{trial.step:,}" + (f"/{int(steps):,}" if steps < float("inf") else "")
        settings = ", ".join(
            f"{key.rpartition('.')[2]} {figures.plain(setting) if isinstance(setting, float) else setting}"
            for key, setting in trial.parameters.items()
        )
        cells = (str(trial.number), trial.state, step, "–" if value is None else figures.plain(value), settings)
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table
