"""Data parallelism by torch's DistributedDataParallel (DDP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import ignore_in_ddp, prepare_backward
from shoestring.collectives import GLOO, broadcast_tensors
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Phase
from shoestring.core.frozen import Reference
from shoestring.wrapped import last_only


def replicate(attachments: Attachments, over: Sequence[str], bucket_mb: float, find_unused: bool) -> None:
    """Wrap the model in DDP over the mesh axes `over`; does nothing if only one rank lies along them."""
    group = attachments.world.group(over)
    if group is None:
        return
    attachments.claim(over, whole=True)
    references = [record.state for record in attachments.kept.values() if isinstance(record.state, Reference)]
    # DDP need not broadcast frozen modules, because ranks have compared hashes of them. DDP cannot broadcast
    # tensors of data types that Gloo lacks.
    frozen = [name for reference in references for name in reference.within_model]
    elsewhere = {name for name, tensor in _tensors(attachments.model) if tensor.is_meta}  # held by other stages
    unsupported = {name for name, tensor in _tensors(attachments.model) if tensor.dtype not in GLOO}
    unsupported -= {*frozen, *elsewhere}
    if frozen or unsupported or elsewhere:
        ignore_in_ddp(attachments.model, [*frozen, *unsupported, *elsewhere])
        attachments.exits.callback(ignore_in_ddp, attachments.model, ())
    model = DistributedDataParallel(
        attachments.model,
        device_ids=[attachments.world.device.index] if attachments.world.device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )
    runs_apart = attachments.run_micro_batches is not None
    attachments.shard(model, over=over, sync=_last_of_several(model) if runs_apart else last_only(model))
    if unsupported:  # broadcast these at the start and before each step, as DDP does with other buffers

        def broadcast() -> None:
            broadcast_tensors([tensor for name, tensor in _tensors(attachments.module) if name in unsupported], group)

        broadcast()
        attachments.at(Phase.FORWARD, broadcast)
    if not find_unused:
        attachments.at(Phase.CLIP, lambda: _check_used(attachments))


def _last_of_several(model: DistributedDataParallel) -> Callable[[bool], AbstractContextManager[Any]]:
    """Return the `sync` for a pipeline, in which other forward passes may run before a backward pass.

    DDP decides in a forward pass whether the next backward pass averages gradients. Here no forward pass may decide so;
    instead the last backward pass is prepared when it begins.
    """
    model.require_backward_grad_sync = False

    def sync(last: bool) -> AbstractContextManager[Any]:
        if last:
            prepare_backward(model)
        return nullcontext()

    return sync


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_used(attachments: Attachments) -> None:
    """Raise ConfigError if a parameter got no gradient. DDP waits for the gradient, so its bucket was not averaged."""
    unused = [name for name, parameter in attachments.trained.items() if parameter.grad is None]
    if unused and len(unused) < len(attachments.trained):  # after a refused step no parameter has a gradient
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ConfigError(
            f"`{unused[0]}`{more} got no gradient in step {attachments.progress.step + 1}, but DDP waits for one",
            hint="set parallel.ddp.find_unused = true, or freeze unused parameters: requires_grad_(False)",
        )
