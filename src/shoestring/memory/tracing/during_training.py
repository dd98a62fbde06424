"""Tracing as a feature of training: every rank records, and the first writes the recording of the highest peak."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from shoestring.core.errors import ShoestringError
from shoestring.core.feature import Phase
from shoestring.memory.fact_names import KIND_FACT, NOTE_FACT, TENSOR_FACT
from shoestring.memory.tracing import page
from shoestring.memory.tracing.labels import STEPPED
from shoestring.memory.tracing.recorder import AllocationRecorder
from shoestring.memory.tracing.recording import FORMAT, MemoryProfile
from shoestring.memory.tracing.summary import by_size, outside

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.memory.settings.tracing import Tracing

log = logging.getLogger("shoestring")

_TENSORS = 12
"""Tensors that the run's report shows."""


def watch(job: Job, settings: Tracing) -> None:
    """Trace the steps that the settings name; from now on, so that what other features take is seen."""
    tracing = _TracedSteps(job, settings)
    if not settings.after:
        tracing.begin()
    job.at(Phase.FORWARD, tracing.before_step)
    job.at(Phase.CAPTURE, tracing.after_step)
    job.exits.callback(tracing.abandon)


class _TracedSteps:
    """The steps of one job that are traced."""

    def __init__(self, job: Job, settings: Tracing) -> None:
        self.job, self.settings = job, settings
        self.recorder: AllocationRecorder | None = None
        self.over = False
        self.passed = 0
        self.leases: dict[str, int] = {}

    def begin(self) -> None:
        """Begin to record; training goes on where that cannot be done."""
        recorder = AllocationRecorder(self._held)
        try:
            recorder.start()
        except (ShoestringError, RuntimeError) as error:
            self.over = True
            log.warning("%s: %s; memory is not traced", self.settings.name, error)
        else:
            self.recorder = recorder

    def before_step(self) -> None:
        if self.recorder is None and not self.over and self.passed >= self.settings.after:
            self.begin()
        elif self.settings.steps and self.passed >= self.settings.after + self.settings.steps:
            self.finish()
        self.passed += 1

    def after_step(self) -> None:
        for name, (nbytes, _) in self.job.world.memory.leases.items():
            self.leases[name] = max(nbytes, self.leases.get(name, 0))
        if self.job.done:
            self.finish()

    def finish(self) -> None:
        """End the recording and write that of the rank with the highest peak; a collective."""
        if self.over:
            return
        began = time.perf_counter()
        world = self.job.world
        contents = world.gather(self._stop().content())
        if world.first:
            profiles = [FORMAT.read(content, f"the recording of rank {rank}") for rank, content in enumerate(contents)]
            peaks = {f"rank {rank}": _peak(profile) for rank, profile in enumerate(profiles)}
            highest = max(profiles, key=_peak)
            self._write(highest.with_ranks(peaks) if len(profiles) > 1 else highest, "memory")
        self.job.trace.aside += time.perf_counter() - began

    def abandon(self) -> None:
        """Write what this rank recorded, where training ended within and no other rank may be waited for."""
        if self.recorder is not None:
            rank = f"-{self.job.world.rank}" if self.job.world.size > 1 else ""
            self._write(self._stop(), f"memory{rank}")

    def _stop(self) -> MemoryProfile:
        recorder, self.recorder, self.over = self.recorder, None, True
        if recorder is None:  # it could not be begun on this rank
            return MemoryProfile()
        return recorder.stop().with_host({f"lease {name}": nbytes for name, nbytes in self.leases.items()})

    def _write(self, profile: MemoryProfile, name: str) -> None:
        """Write the file and the page; training does not end because there is no room for them."""
        if not profile.windows:
            return
        self._note(profile)
        path = Path(self.settings.folder, f"{name}.npz")
        try:
            profile.save(path)
            log.info("memory: %s", page.write(profile, path.with_suffix(".html")))
        except (OSError, ShoestringError) as error:
            log.warning("the recording of memory could not be written: %s", error)

    def _note(self, profile: MemoryProfile) -> None:
        """Leave the numbers of the report in the trace."""
        facts, window = self.job.trace.facts, profile.main
        facts |= {KIND_FACT + kind: float(nbytes) for kind, nbytes in by_size(window)}
        facts |= {TENSOR_FACT + str(held.name): float(held.nbytes) for held in window.held()[:_TENSORS]}
        facts |= {NOTE_FACT + line: 0.0 for line in outside(profile)}

    def _held(self) -> Iterator[tuple[str, str, Tensor]]:
        """What the optimizer steps in place of the model's own parameters, and its gradients."""
        if not hasattr(self.job, "built_optimizer"):
            return
        own = {id(parameter) for parameter in self.job.module.parameters()}
        for name, tensor in self.job.trained.items():
            if id(tensor) not in own:
                yield "optimizer state", f"{name} ({STEPPED})", tensor
                if tensor.grad is not None:
                    yield "gradient", name, tensor.grad


def _peak(profile: MemoryProfile) -> int:
    return profile.main.peak if profile.windows else 0
