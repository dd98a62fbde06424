"""Autocast around the job's forward pass and loss, with a loss scaler for fp16."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from shoestring._torch import has_bf16_units, tree_map_only
from shoestring.core.job import Job

Dtype = Literal["bf16", "fp16", "fp32"]
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose(device: torch.device) -> tuple[Dtype, str]:
    """The 16-bit type the device is good at (or fp32), and why."""
    if device.type == "cuda":
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bf16", f"{name} (compute capability {major}.{minor}) multiplies bf16 at full rate"
        return "fp16", f"{name} (compute capability {major}.{minor}) has no bf16 units; gradients are scaled"
    if has_bf16_units():
        return "bf16", "this CPU multiplies bf16 in hardware"
    return "fp32", "this CPU has no bf16 units (AMX or AVX512-BF16), where bf16 would be slower"


def cast(job: Job, dtype: str) -> None:
    """Cast inside the model's forward pass and around pass and loss together; with fp16, scale the loss.

    The model's output is fp32 again, so that the loss of a foreign loop, which lies outside, is computed in that.
    """
    if dtype == "fp32":
        return
    device, to = job.world.device.type, _TORCH[dtype]
    forward = job.module.forward

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=to):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda each: each.float() if each.dtype == to else each, output)

    job.patch(job.module, cast_forward)  # for a foreign loop, which calls the model itself
    job.surround(partial(torch.autocast, device, dtype=to))
    if dtype == "fp16":
        job.scale_with(torch.amp.GradScaler(device))
