"""Settings of memory tracing, which shows the memory of training tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring import figures
from shoestring.core.feature import Seam, Table
from shoestring.memory.fact_names import KIND_FACT, NOTE_FACT, TENSOR_FACT
from shoestring.report.settings import RecordsSteps

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Tracing(RecordsSteps):
    """Trace memory: name every allocation of a run, and write a file and a page with the tensors at the peak."""

    after: int = 0
    """Number of steps before the first traced step."""
    steps: int = 0
    """Number of steps to trace; 0 traces all steps until training ends. More steps find later peaks and cost time, but
    no memory."""
    folder: str = "."
    """Folder for memory.npz and memory.html, relative to the run's folder or, without one, to the working directory."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.tracing.during_training import watch

        watch(attachments, self)

    def report_items(self, trace: Trace) -> Sequence[Table]:
        kinds, tensors = (
            [(key.removeprefix(prefix), nbytes) for key, nbytes in trace.facts.items() if key.startswith(prefix)]
            for prefix in (KIND_FACT, TENSOR_FACT)
        )
        notes = [key.removeprefix(NOTE_FACT) for key in trace.facts if key.startswith(NOTE_FACT)]
        peak = sum(nbytes for _, nbytes in kinds)
        if not peak:
            return []
        note = " ".join([f"The peak was {figures.memory(peak)}; memory.html takes all of it apart.", *notes])
        return [
            Table(
                title="Memory at the peak",
                head=("Kind", "Share", "Memory"),
                rows=tuple((kind, figures.percent(nbytes / peak), nbytes) for kind, nbytes in kinds),
                note=note,
            ),
            Table(
                title="Largest tensors at the peak",
                head=("Tensor", "Share", "Memory"),
                rows=tuple((name, figures.percent(nbytes / peak), nbytes) for name, nbytes in tensors),
            ),
        ]


Tracing.neutral = Tracing(steps=3)  # with any settings, tracing changes no result
