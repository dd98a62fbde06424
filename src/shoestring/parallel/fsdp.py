"""Sharding by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule, fully_shard

from shoestring.core.attachments import STEPPED, Attachments
from shoestring.core.errors import ConflictError
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.models.blocks import repeated


def shard(attachments: Attachments, over: Sequence[str], replicate: bool, reshard_after_forward: bool) -> None:
    """Shard the model over the mesh axes `over`; does nothing if only one rank lies along them.

    Repeated blocks are sharded one by one, so that the parameters of only one block are gathered at a time.

    Args:
        replicate: whether to shard only within each host, and replicate the shards across hosts.
    """
    world = attachments.world
    if world.mesh is not None and replicate and world.ranks_over([HOSTS]) > 1:
        mesh = world.mesh[HOSTS, LOCAL]  # `fully_shard` replicates over the first axis and shards over the second
    else:
        mesh = world.mesh_over(over)
    if mesh is None:
        return
    attachments.claim(over)
    if owner := attachments.owners.get(STEPPED):
        message = f"`{owner}` has chosen {STEPPED}, and `{attachments.attaching[0]}` would replace its parameters"
        raise ConflictError(message, hint=f"remove the table [{owner}] or [{attachments.attaching[0]}]")
    for module in (*repeated(attachments.model), attachments.model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    within = set(attachments.model.modules())
    for frozen in attachments.frozen_modules.values():
        if not within.intersection(frozen.modules()):  # frozen layers inside the model were sharded with the model
            for module in (*repeated(frozen), frozen):
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
    model = attachments.model
    assert isinstance(model, FSDPModule)

    @contextmanager
    def sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)  # so that FSDP reduce-scatters gradients only in the last micro-batch
        yield

    attachments.shard(over=over, sync=sync)
    attachments.trace.facts["shards"] = mesh.size(-1)
