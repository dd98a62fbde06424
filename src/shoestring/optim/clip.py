"""Gradient clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from shoestring.core.job import Job


def clipper(job: Job, max_norm: float) -> Callable[[], None]:
    """Work for Phase.CLIP; publishes `grad_norm`, the norm before clipping."""

    def clip() -> None:
        norm = torch.nn.utils.clip_grad_norm_(job.parameters, max_norm, foreach=True)
        job.numbers["grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm

    return clip
