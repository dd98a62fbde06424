"""Traces memory during training: every rank records, and the first rank writes the recording with the highest peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from shoestring.memory.fact_names import KIND_FACT, NOTE_FACT, TENSOR_FACT
from shoestring.memory.tracing import page
from shoestring.memory.tracing.labels import STEPPED
from shoestring.memory.tracing.recorder import AllocationRecorder
from shoestring.memory.tracing.recording import FORMAT, MemoryProfile
from shoestring.memory.tracing.summary import by_size, outside
from shoestring.report.recordings import StepRecorder

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.memory.settings.tracing import Tracing

_TENSORS = 12
"""Number of tensors listed in the run's report."""


def watch(attachments: Attachments, settings: Tracing) -> None:
    """Trace the steps that the settings select. Recording starts now, to include the memory of other features."""
    MemoryRecorder(attachments, settings).attach(at_once=not settings.after)


class MemoryRecorder(StepRecorder[MemoryProfile]):
    """Records the allocations of a job's steps."""

    name: ClassVar = "memory"
    form: ClassVar = FORMAT

    def __init__(self, attachments: Attachments, settings: Tracing) -> None:
        super().__init__(attachments, settings)
        self.allocations = AllocationRecorder(self._held)
        self.leases: dict[str, int] = {}

    def start(self) -> None:
        self.allocations.start()

    def stop(self) -> MemoryProfile:
        leased = {f"lease {name}": nbytes for name, nbytes in self.leases.items()}
        return self.allocations.stop().with_host(leased)

    def after_step(self) -> None:
        for name, (nbytes, _) in self.attachments.world.memory.leases.items():
            self.leases[name] = max(nbytes, self.leases.get(name, 0))
        super().after_step()

    def merge(self, recordings: Sequence[MemoryProfile]) -> MemoryProfile:
        """Return the recording of the rank with the highest peak, with the peaks of all ranks added."""
        return max(recordings, key=_peak).with_ranks(
            {f"rank {rank}": _peak(recording) for rank, recording in enumerate(recordings)}
        )

    def write_page(self, recording: MemoryProfile, path: Path) -> Path:
        return page.write(recording, path)

    def note(self, recording: MemoryProfile) -> None:
        facts, window = self.attachments.trace.facts, recording.main
        facts |= {KIND_FACT + kind: float(nbytes) for kind, nbytes in by_size(window)}
        facts |= {TENSOR_FACT + str(held.name): float(held.nbytes) for held in window.held()[:_TENSORS]}
        facts |= {NOTE_FACT + line: 0.0 for line in outside(recording)}

    def _held(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, tensor) of tensors that the optimizer updates instead of parameters, with gradients."""
        if not hasattr(self.attachments, "optimizer"):
            return
        own = {id(parameter) for parameter in self.attachments.module.parameters()}
        for name, tensor in self.attachments.trained.items():
            if id(tensor) not in own:
                yield "optimizer state", f"{name} ({STEPPED})", tensor
                if tensor.grad is not None:
                    yield "gradient", name, tensor.grad


def _peak(profile: MemoryProfile) -> int:
    return profile.main.peak if profile.windows else 0
