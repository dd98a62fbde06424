"""Gradient clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoestring._torch import foreach_mul_
from shoestring.core.attachments import Attachments
from shoestring.optim.norms import global_norm


def clipper(attachments: Attachments, max_norm: float) -> Callable[[], None]:
    """Build the function for Phase.CLIP: it clips by the global norm, and publishes the norm before clipping as
    `grad_norm`."""

    def clip() -> None:
        gradients = {name: tensor.grad for name, tensor in attachments.trained.items() if tensor.grad is not None}
        norm = global_norm(attachments, gradients)
        # As torch's clip_grad_norm_, which takes no tensors of several meshes, and no plain ones beside sharded ones.
        foreach_mul_(attachments.gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        attachments.numbers["grad_norm"] = norm

    return clip
