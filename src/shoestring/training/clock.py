"""Limit a run by time: compute how many steps fit into `run.minutes`, counting the time before each resume."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.report.sinks import seconds_since
from shoestring.run import Settings
from shoestring.storage.whole import write_atomic
from shoestring.training.throughput import Meter

log = logging.getLogger("shoestring")

PACE_STEPS = 12  # steps after which the time per step is steady enough to compute the number of steps
REPLAN = 10  # steps between corrections of the number of steps
LATE = 1.1  # ratio of planned time to time left, above which the plan is corrected even late in a run
SPENT = "spent.json"
"""Name of the file in a run folder that holds the seconds of training before the newest start, including lost steps."""


class TrainingClock:
    """Measures training time over all starts of a run, and sets the number of steps so that it meets `run.minutes`.

    If `run.minutes` is set, checkpoints hold the training time so far.
    """

    def __init__(self, job: Job, settings: Settings) -> None:
        self.job, self.settings = job, settings
        self.before = 0.0
        """Seconds of training in earlier starts of the run."""
        self._seconds = 0.0
        self._began = 0.0
        self._first = 0
        if self.settings.minutes:
            job.keep("clock", self)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.before = self._seconds = float(state_dict["seconds"])

    def count_earlier_starts(self, folder: Path, resumed: int | None) -> None:
        """Add the time of steps that earlier starts did after the checkpoint that is resumed. A collective.

        A checkpoint holds the training time only up to its own step. The times of the steps after the checkpoint are in
        metrics.jsonl, but resuming removes the rows of these steps. So each start writes the total time so far to the
        file `spent.json`.

        Args:
            resumed: step that the run was resumed from; None if it starts from scratch.
        """
        if not self.settings.minutes:
            return

        def spent() -> float:
            written = 0.0
            with suppress(OSError, ValueError, TypeError, KeyError):
                written = float(json.loads((folder / SPENT).read_bytes())["seconds"])
            if self.settings.resume not in (True, False, "auto"):  # resumed from a named, possibly older, checkpoint
                written = 0.0
            since = (resumed or 0) + (written > self.before)  # if `spent.json` is newer, it includes step `resumed`
            seconds = max(self.before, written) + seconds_since(folder / "metrics.jsonl", since)
            write_atomic(folder / SPENT, json.dumps({"seconds": seconds}).encode())
            return seconds

        self.before = self._seconds = self.job.world.decide(spent)

    def start(self) -> None:
        """Start the clock; for a resumed run, set the number of remaining steps by its pace so far. A collective."""
        self._began, self._first = time.perf_counter(), self.job.progress.step
        progress = self.job.progress
        if not self.settings.minutes or not self.before or progress.done:
            return
        left = self.settings.minutes * 60 - self.before
        steps = self.job.world.decide(lambda: int(left * progress.step / self.before))
        if steps > 0:
            plan(progress, steps)
        elif left <= 0 or progress.step:
            log.info("the %g minutes of run.minutes are over", self.settings.minutes)
            self.job.finish()
            progress.total = max(1, int(progress.position))

    def begin_step(self) -> None:
        """Record the time so far; the checkpoint of the step that begins now will hold this time."""
        self._seconds = self.before + time.perf_counter() - self._began

    def end_step(self, meter: Meter) -> None:
        """After `PACE_STEPS` steps, and then every `REPLAN` steps, set the number of remaining steps by the pace.

        A collective. The pace is the median time of the newest steps.
        """
        progress = self.job.progress
        done = progress.step - self._first
        if not self.settings.minutes or done < PACE_STEPS or (done > PACE_STEPS and done % REPLAN):
            return

        def corrected() -> int:
            left = max(self.settings.minutes * 60 - self.before - (time.perf_counter() - self._began), 0.0)
            fitting = max(1, int(left / meter.seconds_per_step))
            return fitting if done == PACE_STEPS or is_worth_it(progress, fitting) else 0

        if steps := self.job.world.decide(corrected):
            plan(progress, steps)


def is_worth_it(progress: Progress, fitting: int) -> bool:
    """Whether to change the number of remaining steps to `fitting`, the number that fits into the time left.

    In the second half of a run, changes would disturb schedules, so they are made only if the run would end too late.
    """
    early = 2 * progress.position < progress.total
    return early or progress.total - progress.position > LATE * fitting * progress.gain


def plan(progress: Progress, steps: int) -> None:
    """Let training end after `steps` more steps.

    The first call sets `total`. Later calls keep `total` and change `gain`, which is how far a step advances the
    position, so that schedules speed up or slow down but never jump.
    """
    progress.total = progress.total or progress.step + steps
    progress.gain = (progress.total - progress.position) / steps
