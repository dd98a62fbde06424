"""Tracing: what the memory of training is of, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.feature import Seam, Table
from shoestring.memory.fact_names import KIND_FACT, NOTE_FACT, TENSOR_FACT
from shoestring.report.recordings import RecordsSteps

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Tracing(RecordsSteps):
    """Trace memory: name every allocation of a run, and take its peak apart, as a file and a page in its folder."""

    after: int = 0
    """Number of steps before the first one that is traced."""
    steps: int = 0
    """Number of steps to trace; 0 traces all until training ends. More steps find later peaks, and cost time, but no
    memory."""
    folder: str = "."
    """Folder for memory.npz and memory.html; in a run it lies in the run's folder."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.memory.tracing.during_training import watch

        watch(job, self)

    def report_items(self, trace: Trace) -> Sequence[Table]:
        kinds, tensors = (
            [(key.removeprefix(prefix), nbytes) for key, nbytes in trace.facts.items() if key.startswith(prefix)]
            for prefix in (KIND_FACT, TENSOR_FACT)
        )
        notes = [key.removeprefix(NOTE_FACT) for key in trace.facts if key.startswith(NOTE_FACT)]
        peak = sum(nbytes for _, nbytes in kinds)
        if not peak:
            return []
        note = " ".join([f"The peak was {peak:,.0f} bytes; memory.html takes all of it apart.", *notes])
        return [
            Table(
                title="Memory at the peak",
                head=("Kind", "Share", "Bytes"),
                rows=tuple((kind, f"{nbytes / peak:.1%}", nbytes) for kind, nbytes in kinds),
                note=note,
            ),
            Table(
                title="Largest tensors at the peak",
                head=("Tensor", "Share", "Bytes"),
                rows=tuple((name, f"{nbytes / peak:.1%}", nbytes) for name, nbytes in tensors),
            ),
        ]


Tracing.neutral = Tracing(steps=3)  # any is
