"""Records a rank's start and failure in the run's history, and writes the report of a failed run."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoestring.core.errors import NonFiniteError, ShoestringError
from shoestring.report import history_file
from shoestring.report.page import write
from shoestring.report.sinks import newest_step

log = logging.getLogger("shoestring")

_FRAMES = 12  # number of innermost calls of a traceback that are stored


class Recorder:
    """A context around everything that a process does for a run; once the run has begun, it records any failure.

    It must be the outermost context: contexts inside it convert exceptions to clear errors, so the history gets the
    message that the user sees.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._rank = 0
        self._step: Callable[[], int] = lambda: 0

    def begin(self, folder: Path, rank: int, step: Callable[[], int], **facts: Any) -> None:
        """Record `started` in the history of `folder`; if the previous start has no end, record `lost` first.

        Args:
            step: returns the last completed step.
            facts: facts of the run (name, ranks, parameters), for a report that is written before the first summary.
        """
        self._folder, self._rank, self._step = folder, rank, step
        if rank > 0:
            return
        if history_file.lost(history_file.read(folder)):
            metrics = folder / "metrics.jsonl"
            ended = {"ended": metrics.stat().st_mtime} if metrics.exists() else {}
            history_file.add(folder, "lost", rank=0, step=newest_step(metrics), **ended)
            _report(folder)
        history_file.add(folder, "started", rank=0, step=step(), **facts)

    def resumed(self) -> None:
        """Record that this start resumes from the checkpoint of the current step."""
        if self._folder is not None and self._rank == 0:
            history_file.add(self._folder, "resumed", rank=0, step=self._step())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        folder = self._folder
        if error is None or folder is None or not (folder / "run.toml").is_file():  # the run had not begun
            return
        name, message, hint, calls = type(error).__name__, f"{type(error).__name__}: {error}", "", ""
        if isinstance(error, ShoestringError):
            name, message, hint = error.parts()
        elif isinstance(error, KeyboardInterrupt):
            name, message = "KeyboardInterrupt", "interrupted from the keyboard"
        else:
            calls = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-_FRAMES))
        described = {"error": name, "message": message, "hint": hint, "traceback": calls}
        with suppress(OSError):  # a full disk may have caused the failure
            history_file.add(folder, "failed", rank=self._rank, step=self._step(), **described)
        if self._rank == 0 or not isinstance(error, NonFiniteError):  # all ranks raise a NonFiniteError
            _report(folder)


def _report(folder: Path) -> None:
    """Write the report page; errors are only logged, because they must not hide why the run failed."""
    try:
        log.info("report: %s", write(folder))
    except Exception as error:
        log.warning("the report could not be written: %s", error)
