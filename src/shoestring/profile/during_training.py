"""Profiling as a feature of training: some steps of a job are recorded on every rank, and merged into one page."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoestring import native
from shoestring.core.errors import ShoestringError
from shoestring.core.feature import Phase
from shoestring.profile import LINE_FACT, CallPaths, ProfileResult, profiled
from shoestring.profile.comparison import merged
from shoestring.profile.lines import by_line, nearest_lines
from shoestring.profile.recording import FORMAT, Profile
from shoestring.profile.summary import code
from shoestring.profile.view import page

if TYPE_CHECKING:
    from shoestring.core.job import Job

log = logging.getLogger("shoestring")

_LINES = 10
"""Lines that the run's report shows."""


def watch(job: Job, settings: CallPaths) -> None:
    """Record the steps that the settings name."""
    with suppress(native.CompileError):  # recorded without it, then, which is said when the recording begins
        native.load("callpaths")  # now, so that no step waits for the compiler
    window = _ProfiledSteps(job, settings)
    job.at(Phase.FORWARD, window.before_step)
    job.at(Phase.CAPTURE, window.after_step)
    job.exits.callback(window.abandon)


class _ProfiledSteps:
    """The steps of one job that are recorded."""

    def __init__(self, job: Job, settings: CallPaths) -> None:
        self.job, self.settings = job, settings
        self.recording = ExitStack()
        self.result: ProfileResult | None = None
        self.passed = self.first = 0
        self.over = False

    @property
    def recorded(self) -> int:
        """Optimizer steps since the recording began."""
        return self.job.progress.step - self.first

    def before_step(self) -> None:
        """Begin before the first step of the window, and end before the first one after it: data loading is in it."""
        if self.result is not None and self.settings.steps and self.recorded >= self.settings.steps:
            self.finish()
        elif self.result is None and not self.over and self.passed >= self.settings.after:
            self.first = self.job.progress.step
            try:
                self.result = self.recording.enter_context(self._recording())
            except RuntimeError as error:
                self.over = True
                log.warning("%s: %s; this one records nothing", self.settings.name, error)
        self.passed += 1

    def _recording(self) -> AbstractContextManager[ProfileResult]:
        settings = self.settings
        return profiled(
            inside=settings.inside,
            share=settings.share,
            budget=settings.budget or None,
            native_frames=settings.native_frames,
        )

    def after_step(self) -> None:
        """End with the last step: also of a loop that ends by itself, where this is called once more."""
        if self.result is not None and self.job.done:
            self.finish()

    def finish(self) -> None:
        """End the recording and write what all ranks recorded; a collective."""
        began = time.perf_counter()
        profile, world = self._stop(), self.job.world
        contents = world.gather(profile.content())
        if world.first:
            profiles = [FORMAT.read(content, f"the profile of rank {rank}") for rank, content in enumerate(contents)]
            whole = merged(profiles) if len(profiles) > 1 else profile
            self._note(whole)
            self._write(whole, "profile")
        self.job.trace.aside += time.perf_counter() - began

    def abandon(self) -> None:
        """Write what this rank recorded, where training ended within the window and no other rank may be waited for."""
        if self.result is not None:
            rank = f"-{self.job.world.rank}" if self.job.world.size > 1 else ""
            self._write(self._stop(), f"profile{rank}")

    def _stop(self) -> Profile:
        result, self.result, self.over = self.result, None, True
        self.recording.close()
        assert result is not None
        return replace(result.profile, facts=replace(result.profile.facts, steps=self.recorded))

    def _write(self, profile: Profile, name: str) -> None:
        """Write the file and the page; training does not end because there is no room for them."""
        path = Path(self.settings.folder, f"{name}.npz")
        try:
            profile.save(path)
            log.info("profile: %s", page.write(profile, path.with_suffix(".html")))
        except (OSError, ShoestringError) as error:
            log.warning("the profile could not be written: %s", error)

    def _note(self, profile: Profile) -> None:
        """Leave the numbers of the report in the trace."""
        tree, inside = profile.tree, profile.facts.inside
        unknown = tree.own[nearest_lines(tree, inside) < 0].sum()
        self.job.trace.facts |= {
            "profiled_seconds": profile.facts.seconds,
            "profiled_steps": float(self.recorded),
            "profile_overhead": profile.facts.overhead,
            "profile_unknown": float(np.abs(unknown)) / 1e9,
        }
        lines = sorted(by_line(tree, inside).items(), key=lambda item: -item[1].total)
        for (file, line), time_of_line in lines[:_LINES]:
            written = code(profile.sources, file, line)
            place = f"{Path(file).name}:{line}"
            self.job.trace.facts[f"{LINE_FACT}{place} {written}"] = time_of_line.total / 1e9
