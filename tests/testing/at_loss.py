"""A feature at the LOSS seam, to show what the suite asks of those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class Scaled(Feature):
    """Multiply the loss."""

    factor: float = 0.9
    """What it is multiplied by."""

    seams: ClassVar = (Seam.LOSS,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        loss = attachments.loss

        def scaled(output: Any, batch: Any) -> Any:
            total, count = loss(output, batch)
            return total * self.factor, count

        attachments.loss = scaled


Scaled.neutral = Scaled(factor=1.0)
