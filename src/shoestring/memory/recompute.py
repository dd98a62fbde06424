"""Activation checkpointing of a model's repeated blocks: whole blocks, or selective, with some results in memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoestring.core.attachments import Attachments
from shoestring.models.blocks import repeated

if TYPE_CHECKING:
    from shoestring.memory.settings.recompute import Recompute


def recompute(attachments: Attachments, settings: Recompute) -> None:
    """Make the blocks that the settings select recompute their activations, until the job is closed."""
    blocks = repeated(attachments.model)
    treated = blocks[:: settings.every_nth][: settings.blocks or None]
    options = {"context_fn": contexts_holding(settings.saved_operators)} if settings.saved_operators else {}
    for block in treated:
        _checkpoint(attachments, block, options)
    attachments.trace.facts |= {"blocks": len(blocks), "recomputed_blocks": len(treated)}


def _checkpoint(attachments: Attachments, block: nn.Module, options: dict[str, Any]) -> None:
    """Checkpoint a block by replacing its `forward`, because a wrapper module would rename its parameters."""
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    attachments.patch(block, checkpointed)


def call_name(func: Any, index: int) -> str:
    """Name of the `index`-th call of an operator in a block, in the notation of `Recompute.saved_operators`."""
    return f"{operator_name(func)}:{index}"


def operator_name(func: Any) -> str:
    """Name of an operator of `torch.ops.aten` without its namespace and overload."""
    return func.overloadpacket.__name__


@cache
def operators() -> frozenset[str]:
    """Names of all registered operators, without namespaces and overloads."""
    return frozenset(re.sub(r"^.*::|\..*$", "", name) for name in torch._C._dispatch_get_all_op_names())


def contexts_holding(names: tuple[str, ...]) -> Callable[[], tuple[Any, Any]]:
    """Return a `context_fn` for `torch.utils.checkpoint` that saves the results of these operators or calls."""
    return partial(_contexts, names)


def _contexts(names: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the contexts for the forward pass and for the recomputation of one checkpointed call."""
    counts = {False: Counter[str](), True: Counter[str]()}

    def decide(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name, calls = operator_name(func), counts[context.is_recompute]
        calls[name] += 1
        held = name in names or f"{name}:{calls[name]}" in names
        return CheckpointPolicy.MUST_SAVE if held else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
