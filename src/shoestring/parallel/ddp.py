"""Replication by torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import ignore_in_ddp
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Phase
from shoestring.core.frozen import Reference
from shoestring.core.job import Job
from shoestring.core.step import no_sync


def replicate(job: Job, over: Sequence[str], bucket_mb: float, find_unused: bool) -> None:
    """Wrap the model in DDP over these mesh axes; nothing where this rank is alone along them."""
    group = job.world.group(over)
    if group is None:
        return
    frozen = [kept.state.within_model for kept in job.kept.values() if isinstance(kept.state, Reference)]
    if names := [name for each in frozen for name in each]:  # equal on all ranks already, and of types Gloo cannot send
        ignore_in_ddp(job.model, names)
        job.exits.callback(ignore_in_ddp, job.model, ())
    model = DistributedDataParallel(
        job.model,
        device_ids=[job.world.device.index] if job.world.device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )
    job.shard(model, over=over, sync=no_sync(model))
    if not find_unused:
        job.at(Phase.CLIP, lambda: _check_used(job))


def _check_used(job: Job) -> None:
    """Refuse a step in which a parameter got no gradient: DDP did not average the bucket that it lies in."""
    unused = [name for name, parameter in job.trained.items() if parameter.grad is None]
    if unused and len(unused) < len(job.trained):  # of a step that was refused, none is left
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ConfigError(
            f"`{unused[0]}`{more} got no gradient in step {job.progress.step + 1}, and DDP waits for them",
            hint="set parallel.ddp.find_unused = true, or freeze what is not used: requires_grad_(False)",
        )
