"""Fewer bytes on the wire between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Saving, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

__all__ = ["BF16"]


@dataclass(frozen=True, kw_only=True)
class BF16(Feature):
    """Exchange gradients as bf16: half the bytes of fp32, with bf16's rounding in the sums."""

    seams: ClassVar = (Seam.WIRE,)

    def check(self, job: Job) -> None:
        if job.world.size > 1 and job.engine != "ddp":
            raise ConfigError(
                f"{self.name} hooks into DDP, and the model is not under DDP", hint=f"remove [{self.name}]"
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.comm.bf16 import compress

        compress(job)

    def saving(self, trace: Trace) -> Saving | None:
        ranks, whole = trace.facts["ranks"], trace.facts["gradient_bytes"]
        if ranks == 1:
            return None
        ring = 2 * (ranks - 1) / ranks
        return Saving(
            unit="MB sent a rank and step",
            used=ring * whole / 2 / 1e6,
            without=ring * whole / 1e6,
            measured=False,
            cost="gradients are rounded to 8 bits of precision",
        )
