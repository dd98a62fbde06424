"""Activation checkpointing of a model's repeated blocks, whole or but for some operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoestring.core.job import Job
from shoestring.models.blocks import repeated

if TYPE_CHECKING:
    from shoestring.memory.settings.recompute import Recompute


def recompute(job: Job, settings: Recompute) -> None:
    """Recompute the blocks that the settings name."""
    blocks = repeated(job.model)
    treated = blocks[:: settings.every][: settings.blocks or None]
    options = {"context_fn": contexts_holding(settings.keep)} if settings.keep else {}
    for block in treated:
        _wrap(job, block, options)
    job.trace.facts |= {"blocks": len(blocks), "recomputed_blocks": len(treated)}


def _wrap(job: Job, block: nn.Module, options: dict[str, Any]) -> None:
    """Replace the block's forward in place, so that no parameter is renamed; undone when the job closes."""
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    job.patch(block, checkpointed)


def call_name(func: Any, index: int) -> str:
    """Name of the so-manieth call of an operator in a block, as `Recompute.keep` has it."""
    return f"{operator_name(func)}:{index}"


def operator_name(func: Any) -> str:
    """Of an overload of `torch.ops.aten`: its name without namespace and overload."""
    return func.overloadpacket.__name__


@cache
def operators() -> frozenset[str]:
    """Names of all operators that are registered, without namespace and overload."""
    return frozenset(re.sub(r"^.*::|\..*$", "", name) for name in torch._C._dispatch_get_all_op_names())


def contexts_holding(names: tuple[str, ...]) -> Callable[[], tuple[Any, Any]]:
    """`context_fn` of `torch.utils.checkpoint` that holds what these operators or calls of them return."""
    return partial(_contexts, names)


def _contexts(names: tuple[str, ...]) -> tuple[Any, Any]:
    """For a call of `torch.utils.checkpoint`, in which the calls of each operator are counted forward and again."""
    counts = {False: Counter[str](), True: Counter[str]()}

    def decide(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name, calls = operator_name(func), counts[context.is_recompute]
        calls[name] += 1
        held = name in names or f"{name}:{calls[name]}" in names
        return CheckpointPolicy.MUST_SAVE if held else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
