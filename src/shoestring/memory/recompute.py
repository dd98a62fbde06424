"""Activation checkpointing of a model's repeated blocks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.core.job import Job
from shoestring.models.blocks import repeated


def recompute(job: Job, every: int) -> None:
    blocks = repeated(job.model)
    treated = blocks[::every]
    for block in treated:
        _wrap(job, block)
    job.trace.facts |= {"blocks": len(blocks), "recomputed_blocks": len(treated)}


def _wrap(job: Job, block: nn.Module) -> None:
    """Replace the block's forward in place, so that no parameter is renamed; undone when the job closes."""
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    job.patch(block, checkpointed)
