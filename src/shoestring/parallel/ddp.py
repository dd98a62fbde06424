"""Replication by torch's DistributedDataParallel."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from shoestring import parallel
from shoestring.core.job import Job, no_sync


def replicate(job: Job, settings: parallel.DDP) -> None:
    group = job.world.group(settings.over)
    if group is None:
        return
    model = DistributedDataParallel(
        job.model,
        device_ids=[job.world.device.index] if job.world.device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=settings.bucket_mb,  # pyright: ignore[reportArgumentType]  (a float works and is documented)
        find_unused_parameters=settings.find_unused,
        gradient_as_bucket_view=True,
    )
    job.model, job.replicas, job.sync = model, settings.over, no_sync(model)
