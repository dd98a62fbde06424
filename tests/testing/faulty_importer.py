"""A feature that looks into another area."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class Peeks(Feature):
    """Looks for another area's feature."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        import shoestring as ss

        assert not any(isinstance(feature, ss.comm.BF16) for feature in attachments.features)
