"""Held-out loss."""

from __future__ import annotations

from shoestring.core.job import Job
from shoestring.data.loader import sweep
from shoestring.feed import Feed, moved
from shoestring.run import Run


def evaluate(job: Job, run: Run, data: Feed, limit: int = 0) -> dict[str, float]:
    """The held-out loss over the first `limit` samples (0: all); {} without held-out data. A collective."""
    if data.held_out is None:
        return {}
    rank, size = job.world.index_over(job.data_axes), job.world.ranks_over(job.data_axes)
    micro = max(1, run.settings.batch // (size * run.settings.accumulate))
    batches = sweep(data.held_out, batch=micro, rank=rank, size=size, limit=limit)
    total, count = job.evaluate(moved(batch, job.world.device) for batch in batches)
    loss = total / max(count, 1)
    values = {"held_out_loss": loss}
    return values | ({"held_out_bits_per_byte": loss * data.bits(held_out=True)} if data.corpus else {})
