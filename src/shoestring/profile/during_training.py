"""Profiles selected training steps on every rank, and merges the ranks' profiles into one page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from shoestring import native
from shoestring.profile import CallPaths, ProfileResult, profiled
from shoestring.profile.comparison import merged
from shoestring.profile.fact_names import LINE_FACT
from shoestring.profile.lines import by_line, nearest_lines
from shoestring.profile.recording import FORMAT, Profile
from shoestring.profile.summary import code
from shoestring.profile.view import page
from shoestring.report.recordings import StepRecorder

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments

_LINES = 10
"""Number of source lines shown in the run's report."""


def watch(attachments: Attachments, settings: CallPaths) -> None:
    """Register a profiler for the training steps that the settings select."""
    with suppress(native.CompileError):  # then torch.profiler is used, and a warning is logged
        native.load("callpaths")  # compile now, so that no training step has to wait
    ProfileRecorder(attachments, settings).attach()


class ProfileRecorder(StepRecorder[Profile]):
    """Records the call paths of a job's steps."""

    name: ClassVar = "profile"
    form: ClassVar = FORMAT

    def __init__(self, attachments: Attachments, settings: CallPaths) -> None:
        super().__init__(attachments, settings)
        self.callpaths = settings
        self.window = ExitStack()
        self.result = ProfileResult()
        self.first = 0

    def start(self) -> None:
        settings = self.callpaths
        self.first = self.attachments.progress.step
        self.result = self.window.enter_context(
            profiled(
                inside=settings.inside,
                share=settings.sample_rate,
                budget=settings.max_overhead or None,
                native_frames=settings.native_frames,
            )
        )

    def stop(self) -> Profile:
        self.window.close()
        profile = self.result.profile
        return replace(profile, facts=replace(profile.facts, steps=self.attachments.progress.step - self.first))

    def merge(self, recordings: Sequence[Profile]) -> Profile:
        return merged(recordings)

    def write_page(self, recording: Profile, path: Path) -> Path:
        return page.write(recording, path)

    def note(self, recording: Profile) -> None:
        tree, facts, inside = recording.tree, recording.facts, recording.facts.inside
        unknown = tree.own[nearest_lines(tree, inside) < 0].sum()
        self.attachments.trace.facts |= {
            "profiled_seconds": facts.seconds,
            "profiled_steps": float(self.attachments.progress.step - self.first),
            "profile_overhead": facts.overhead,
            "profile_unknown": float(np.abs(unknown)) / 1e9,
        }
        lines = sorted(by_line(tree, inside).items(), key=lambda item: -item[1].total)
        for (file, line), time_of_line in lines[:_LINES]:
            written = code(recording.sources, file, line)
            place = f"{Path(file).name}:{line}"
            self.attachments.trace.facts[f"{LINE_FACT}{place} {written}"] = time_of_line.total / 1e9
