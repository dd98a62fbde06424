"""Fewer bits for the arithmetic that does not need them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.world import World

__all__ = ["Autocast"]


@dataclass(frozen=True, kw_only=True)
class Autocast(Feature):
    """Run the forward pass in a 16-bit type where torch's autocast considers that safe; weights keep their type."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type of the forward pass: `auto` takes bf16 where the device computes it fast, fp16 with a loss scaler on
    GPUs without bf16, and fp32 elsewhere."""

    seams: ClassVar = (Seam.MODEL,)

    def resolve(self, world: World) -> Self:
        from shoestring.precision.autocast import choose

        return replace(self, dtype=choose(world.device)[0]) if self.dtype == "auto" else self

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.precision.autocast import cast

        cast(job, self.dtype)

    def explain(self, job: Job) -> str:
        from shoestring.precision.autocast import choose

        best, why = choose(job.world.device)
        return f"{self.dtype}: {why}" if self.dtype == best else f"{self.dtype} as asked; auto would take {best}: {why}"


Autocast.neutral = Autocast(dtype="fp32")
