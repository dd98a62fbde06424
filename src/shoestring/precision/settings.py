"""Settings of mixed precision; importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.feature import Feature, Inexact, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.world import World


@dataclass(frozen=True, kw_only=True)
class Autocast(Feature):
    """Run the forward pass in a 16-bit type where torch's autocast considers that safe; weights keep their type."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type of the forward pass: `auto` takes bf16 where the device computes it fast, fp16 with a loss scaler on
    GPUs without bf16, and fp32 elsewhere."""

    seams: ClassVar = (Seam.MODEL,)

    @property
    def inexact(self) -> Inexact:
        return "" if self.dtype == "fp32" else "numbers"

    @property
    def scales_loss(self) -> bool:
        return self.dtype == "fp16"

    def resolve(self, world: World) -> Self:
        from shoestring.precision.autocast import choose

        return replace(self, dtype=choose(world.device)[0]) if self.dtype == "auto" else self

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.precision.autocast import cast

        cast(attachments, self.dtype)

    def explain(self, attachments: Attachments) -> str:
        from shoestring.precision.autocast import choose

        best, why = choose(attachments.world.device)
        return f"{self.dtype}: {why}" if self.dtype == best else f"{self.dtype} as asked; auto would take {best}: {why}"


Autocast.neutral = Autocast(dtype="fp32")
