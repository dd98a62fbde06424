"""A limit of memory, below which a run stays at the least cost of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

Knob = Literal["accumulate", "recompute", "zero", "fsdp", "offload", "activations", "8bit"]


@dataclass(frozen=True, kw_only=True)
class Budget(Feature):
    """Stay below a peak of memory: choose, before training starts, what lowers it and costs the least time."""

    gib: float
    """Peak of a rank in GiB that is not to be exceeded, as torch's allocator counts it."""
    allow: tuple[Knob, ...] = ("accumulate", "recompute", "zero", "fsdp", "offload", "activations", "8bit")
    """Techniques that may be chosen: smaller micro-batches, selective recomputation, [memory.zero], [parallel.fsdp],
    [memory.offload], [memory.offloadactivations], and [optim.adamw8bit], which rounds optimizer state and is taken
    where nothing else fits."""
    chosen: str = ""
    """Techniques that were chosen, in words; filled in when the choice is made, which is not made again."""
    predicted_gib: float = 0.0
    """Predicted peak in GiB with the choice; filled in."""
    without_gib: float = 0.0
    """Predicted peak in GiB without it; filled in."""
    added: float = 0.0
    """Predicted time that the choice adds to a step, as a part of the step's; filled in."""

    seams: ClassVar = (Seam.MODEL,)

    def check(self, job: Job) -> None:
        if self.gib <= 0:
            raise ConfigError(f"`{self.name}.gib` must be positive, got {self.gib}")
        if not self.chosen:
            raise ConfigError(
                f"`{self.name}` chooses for run files, before anything is built",
                hint="`shoestring check run.toml` says what it chooses: attach that",
            )

    def apply(self, job: Job, seam: Seam) -> None:
        return

    def explain(self, job: Job) -> str:
        peaks = f"{self.predicted_gib:.3g} GiB predicted of {self.gib:.3g}, {self.without_gib:.3g} without"
        return f"{self.chosen}; {peaks}" + (f"; a step takes {self.added:.0%} longer" if self.added >= 0.005 else "")

    def reduction(self, trace: Trace) -> Reduction | None:
        return Reduction(
            unit="GiB at the peak of a rank",
            used=self.predicted_gib,
            without=self.without_gib,
            measured=False,
            cost=f"{self.chosen}: {self.added:.0%} of a step's time, predicted",
        )
