"""Replication by torch's DistributedDataParallel."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from shoestring import parallel
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.job import Job, no_sync


def replicate(job: Job, settings: parallel.DDP) -> None:
    if job.world.size == 1:
        return
    model = DistributedDataParallel(
        job.model,
        device_ids=[job.world.device.index] if job.world.device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_mb,  # pyright: ignore[reportArgumentType]  (a float works and is documented)
        find_unused_parameters=settings.find_unused,
        gradient_as_bucket_view=True,
    )
    job.model, job.replicas, job.sync = model, (HOSTS, LOCAL), no_sync(model)
