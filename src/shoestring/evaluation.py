"""Held-out loss."""

from __future__ import annotations

from shoestring.core.job import Job
from shoestring.feed import Feed, held_out_batches
from shoestring.run import Run


def evaluate(job: Job, run: Run, data: Feed, limit: int = 0) -> dict[str, float]:
    """The held-out loss over the first `limit` samples (0: all); {} without held-out data. A collective."""
    if data.held_out is None:
        return {}
    micro = max(1, run.settings.batch // (job.world.size * run.settings.accumulate))
    total, count = job.evaluate(held_out_batches(data.held_out, micro, job.world, limit))
    loss = total / max(count, 1)
    values = {"held_out_loss": loss}
    return values | ({"held_out_bits_per_byte": loss * data.bits(held_out=True)} if data.corpus else {})
