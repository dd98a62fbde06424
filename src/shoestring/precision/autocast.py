"""Autocast around the job's forward pass and loss, with a loss scaler for fp16."""

from __future__ import annotations

from typing import Literal

import torch

from shoestring.core._torch import has_bf16_units
from shoestring.core.job import Batch, Job, Output

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
    """Wrap `job.forward` and `job.loss`; with fp16, turn the job's scaler on."""
    if dtype == "fp32":
        return
    device, to = job.world.device.type, _TORCH[dtype]
    forward, loss = job.forward, job.loss

    def cast_forward(model: torch.nn.Module, batch: Batch) -> Output:
        with torch.autocast(device, dtype=to):
            return forward(model, batch)

    def cast_loss(output: Output, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device, dtype=to):
            return loss(output, batch)

    job.forward, job.loss = cast_forward, cast_loss
    if dtype == "fp16":
        job.scaler = torch.amp.GradScaler(device)
