"""Gradient clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from shoestring.core.attachments import Attachments


def clipper(attachments: Attachments, max_norm: float) -> Callable[[], None]:
    """Build the function for Phase.CLIP: it clips by the global norm, and publishes the norm before clipping as
    `grad_norm`."""

    def clip() -> None:
        norm = torch.nn.utils.clip_grad_norm_(attachments.parameters, max_norm, foreach=True)
        attachments.numbers["grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm

    return clip
