"""Autocast around the job's forward pass and loss, with a loss scaler for fp16."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from shoestring._torch import has_bf16_units, tree_map_only
from shoestring.core.attachments import Attachments

Dtype = Literal["bf16", "fp16", "fp32"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose(device: torch.device) -> tuple[Dtype, str]:
    """Choose the data type for `auto`: a 16-bit type if the device computes it fast, else fp32.

    Returns:
        The data type, and the reason for the choice.
    """
    if device.type == "cuda":
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bf16", f"{name} (compute capability {major}.{minor}) multiplies bf16 at full rate"
        return "fp16", f"{name} (compute capability {major}.{minor}) has no bf16 units; gradients are scaled"
    if has_bf16_units():
        return "bf16", "this CPU multiplies bf16 in hardware"
    return "fp32", "this CPU has no bf16 units (AMX or AVX512-BF16), where bf16 would be slower"


def cast(attachments: Attachments, dtype: str) -> None:
    """Run the model's forward pass and the job's loss under autocast; with fp16, scale the loss.

    The model's output is cast back to fp32, because a user's own training loop computes its loss outside of autocast.
    """
    if dtype == "fp32":
        return
    device, to = attachments.world.device.type, TYPES[dtype]
    forward = attachments.module.forward

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=to):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype == to else tensor, output)

    attachments.patch(attachments.module, cast_forward)  # needed in users' own loops, which call the model directly
    attachments.surround(partial(torch.autocast, device, dtype=to))
    if dtype == "fp16":
        attachments.scale_with(torch.amp.GradScaler(device))
