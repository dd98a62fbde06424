"""A feature whose settings cannot be read without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoestring.core.attachments import Attachments
from shoestring.core.feature import Feature, Seam


@dataclass(frozen=True, kw_only=True)
class Heavy(Feature):
    """Needs torch to be described."""

    dtype: str = str(torch.float32)
    """Not used."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        return
