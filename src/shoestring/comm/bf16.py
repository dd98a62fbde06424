"""Gradient exchange in bf16 by torch's own DDP communication hook."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from shoestring.core.job import Job


def compress(job: Job) -> None:
    if isinstance(job.model, DistributedDataParallel):
        job.model.register_comm_hook(None, bf16_compress_hook)
