"""Sharding by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.models.blocks import repeated


def shard(job: Job, over: Sequence[str], replicate: bool, reshard_after_forward: bool) -> None:
    """Shard the model over these mesh axes, or with `replicate` inside each host; nothing where this rank is alone."""
    mesh = _mesh(job.world, over, replicate)
    if mesh is None:
        return
    for module in (*repeated(job.model), job.model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    within = set(job.model.modules())
    for frozen in job.frozen_modules.values():
        if not within.intersection(frozen.modules()):  # layers of the model are sharded with it
            for module in (*repeated(frozen), frozen):
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
    assert isinstance(job.model, FSDPModule)
    job.shard(over=over, sync=_sync(job.model))
    job.trace.facts["shards"] = mesh.size(-1)


def _mesh(world: World, over: Sequence[str], replicate: bool) -> DeviceMesh | None:
    """One dimension shards; of two, the first replicates."""
    if world.mesh is not None and replicate and world.ranks_over([HOSTS]) > 1:
        return world.mesh[HOSTS, LOCAL]
    return world.mesh_over(over)


def _sync(model: FSDPModule) -> Callable[[bool], AbstractContextManager[None]]:
    """Reduce gradients in the last micro-batch only."""

    @contextmanager
    def sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    return sync
