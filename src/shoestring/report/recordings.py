"""The recorder for features that record some steps of a run to a file and a page."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from shoestring.core.errors import ShoestringError
from shoestring.core.feature import Phase

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.report.settings import RecordsSteps
    from shoestring.storage.arrays import Format

log = logging.getLogger("shoestring")


class Recording(Protocol):
    """Recorded data of one or several ranks; it is exchanged between ranks as bytes."""

    def content(self) -> bytes:
        """The content of the recording's file."""
        ...

    def save(self, path: Path) -> None:
        """Write the recording's file."""
        ...


R = TypeVar("R", bound=Recording)


class StepRecorder(ABC, Generic[R]):
    """Records the steps selected by the settings on every rank; rank 0 merges and writes the recordings of all ranks.

    A rank that cannot record logs a warning and still takes part in the final gather, so that other ranks do not hang.
    """

    name: ClassVar[str]
    """Name of the file and of the page, without extension."""
    form: ClassVar[Format]
    """File format for reading the recording from bytes."""

    def __init__(self, attachments: Attachments, settings: RecordsSteps) -> None:
        self.attachments, self.settings = attachments, settings
        self.steps_begun = 0
        self.recording = self.refused = self.finished = False

    @abstractmethod
    def start(self) -> None:
        """Start recording.

        Raises:
            ShoestringError, RuntimeError: this process cannot record.
        """

    @abstractmethod
    def stop(self) -> R:
        """Stop recording; returns the recording."""

    @abstractmethod
    def merge(self, recordings: Sequence[R]) -> R:
        """Merge the recordings of several ranks into one."""

    @abstractmethod
    def note(self, recording: R) -> None:
        """Add the recording's figures to the trace, for the run's report."""

    @abstractmethod
    def write_page(self, recording: R, path: Path) -> Path:
        """Write the page of a recording; returns the page's path."""

    def attach(self, *, at_once: bool = False) -> None:
        """Register the recorder; `at_once` starts it now, so that it also records what is built before the steps."""
        if at_once:
            self.begin()
        self.attachments.at(Phase.FORWARD, self.before_step)
        self.attachments.at(Phase.CAPTURE, self.after_step)
        self.attachments.exits.callback(self.abandon)

    def begin(self) -> None:
        """Start recording; if that fails, log a warning and let training continue."""
        try:
            self.start()
        except (ShoestringError, RuntimeError) as error:
            self.refused = True
            log.warning("%s: %s; nothing is recorded", self.settings.name, error)
        else:
            self.recording = True

    def before_step(self) -> None:
        """Start at the first selected step; finish at the step after the last one, to include its data loading."""
        if self.steps_begun >= self.settings.after and not (self.recording or self.refused or self.finished):
            self.begin()
        elif self.settings.steps and self.steps_begun >= self.settings.after + self.settings.steps:
            self.finish()
        self.steps_begun += 1

    def after_step(self) -> None:
        """Finish when training is done; a loop that ends early runs this phase once more."""
        if self.attachments.done:
            self.finish()

    def finish(self) -> None:
        """Stop recording, gather the recordings of all ranks and write them; the first call is a collective."""
        if self.finished:
            return
        began = time.perf_counter()
        world = self.attachments.world
        contents = world.gather(self._stop().content() if self.recording else b"")
        self.finished = True
        if world.first:
            recordings = [
                self.form.read(content, f"the recording of rank {rank}")
                for rank, content in enumerate(contents)
                if content
            ]
            if recordings:
                self._write(self.merge(recordings) if len(recordings) > 1 else recordings[0], self.name)
        self.attachments.trace.aside += time.perf_counter() - began

    def abandon(self) -> None:
        """Write this rank's recording without waiting for other ranks, if training ends while steps are recorded."""
        if self.recording:
            rank = f"-{self.attachments.world.rank}" if self.attachments.world.size > 1 else ""
            self._write(self._stop(), f"{self.name}{rank}")

    def _stop(self) -> R:
        self.recording, self.refused = False, True  # `refused` prevents a second recording
        return self.stop()

    def _write(self, recording: R, name: str) -> None:
        """Write the file and the page; failures, such as a full disk, are logged and do not end training."""
        path = Path(self.settings.folder, f"{name}.npz")
        try:
            self.note(recording)
            recording.save(path)
            log.info("%s: %s", self.name, self.write_page(recording, path.with_suffix(".html")))
        except (OSError, ShoestringError) as error:
            log.warning("%s: the recording could not be written: %s", self.settings.name, error)
