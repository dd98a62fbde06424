"""Held-out loss."""

from __future__ import annotations

from shoestring.core.job import Job
from shoestring.data.loader import sweep
from shoestring.run import Run
from shoestring.training.data_loading import Feed, moved


def evaluate(job: Job, run: Run, data: Feed, limit: int = 0) -> dict[str, float]:
    """The held-out loss over the first `limit` samples (0: all); {} without held-out data. A collective.

    Of a mixture it is over all sources together, and `held_out_loss_NAME` is that of each.
    """
    if data.held_out is None:
        return {}
    rank, size = job.world.index_over(job.data_axes), job.world.ranks_over(job.data_axes)
    micro = max(1, run.settings.batch // (size * run.settings.accumulate))
    parts = data.corpus.parts if data.corpus else {}
    held_out = {name: part.held_out for name, part in parts.items()} or {"": data.held_out}
    sums: dict[str, tuple[float, int]] = {}
    for name, samples in held_out.items():
        batches = sweep(samples, batch=micro, rank=rank, size=size, limit=-(-limit // len(held_out)))
        sums[name] = job.evaluate(moved(batch, job.world.device) for batch in batches)
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    loss = total / max(count, 1)
    values = {"held_out_loss": loss}
    if data.corpus:
        values["held_out_bits_per_byte"] = loss * data.bits(held_out=True)
    return values | {f"held_out_loss_{name}": total / max(count, 1) for name, (total, count) in sums.items() if name}
