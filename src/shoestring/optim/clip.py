"""Gradient clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoestring._torch import foreach_mul_
from shoestring.core.attachments import Attachments
from shoestring.optim.norms import global_norm
from shoestring.sharded import is_sharded


def clipper(attachments: Attachments, max_norm: float) -> Callable[[], None]:
    """Build the function for Phase.CLIP, which clips gradients by the global norm and publishes the norm before
    clipping as `grad_norm`."""

    def clip() -> None:
        gradients = {name: tensor.grad for name, tensor in attachments.trained.items() if tensor.grad is not None}
        # Torch's function gives the same bits as a loop that calls `clip_grad_norm_`. But that function supports only
        # DTensors of a single mesh, without plain tensors among them.
        if attachments.parted or any(is_sharded(gradient) for gradient in gradients.values()):
            norm = global_norm(attachments, gradients)
        else:
            norm = torch.nn.utils.get_total_norm(list(gradients.values()), foreach=True)
        foreach_mul_(attachments.gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        attachments.numbers["grad_norm"] = norm

    return clip
