"""Settings of AdamW with 8-bit moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Inexact, Seam
from shoestring.optim.settings.standard import AdamW

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamW):
    """AdamW with 8-bit moments, the running averages of the gradient and of its square (Dettmers et al., 2022). Moments
    are rounded in blocks of 256 elements; small tensors keep 32-bit moments. Optimizer state takes a quarter of the
    memory, and a step takes longer."""

    @property
    def inexact(self) -> Inexact:
        return "numbers"

    def check(self, attachments: Attachments) -> None:
        AdamW.check(self, attachments)
        for feature in attachments.features:
            if feature.divided and attachments.world.ranks_over(feature.over) > 1:
                raise ConfigError(
                    f"`{self.name}` rounds whole tensors, and `{feature.name}` divides them among ranks",
                    hint="use optim.adamw",
                )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.eight_bit import build

        attachments.build_with(build(attachments, self))
