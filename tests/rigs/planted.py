"""Faults planted in pipelines and in split layers, to see that a comparison with one process notices each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoestring.checkpoint.tiers import staging
from shoestring.core.attachments import Attachments
from shoestring.core.kept import ModelState, OptimizerState
from shoestring.core.shard_order import ShardOrder
from shoestring.core.step import MicroBatches
from shoestring.models.blocks import is_transposed
from shoestring.optim import norms
from shoestring.parallel import ddp
from shoestring.parallel.pipeline.messages import Inbox, Outbox
from shoestring.parallel.pipeline.running import Running
from shoestring.parallel.pipeline.stage import Stage
from shoestring.parallel.tensor.collectives import SharingRanks, SumGradients, SumParts
from shoestring.parallel.tensor.splitting import Splitting
from tests.rigs.pipelines import train

Inner = Callable[..., Any]


def around(owner: Any, name: str, work: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """A patch of a method: `work` gets the method, and its arguments."""
    inner = getattr(owner, name)
    return lambda: patch.object(owner, name, lambda *args, **kwargs: work(inner, *args, **kwargs))


def instead(owner: Any, name: str, work: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(owner, name, work)


def count_twice(inner: Inner, micro: MicroBatches, output: Any, batch: Any) -> Tensor:
    before = micro.sums[1].clone()
    loss = inner(micro, output, batch)
    micro.sums[1] += micro.sums[1] - before
    return loss


def other_rows(inner: Inner, box: Inbox, key: tuple[int, int]) -> Tensor:
    return inner(box, key).flip(0) if key[1] == 1 else inner(box, key)


def fewer_bits(inner: Inner, box: Outbox, key: tuple[int, int], *tensors: Tensor) -> None:
    inner(box, key, *tensors[:-1], tensors[-1].float().double())


def twice(inner: Inner, *args: Any) -> None:
    inner(*args)
    inner(*args)


def stale(inner: Inner, running: Running) -> None:
    inner(running)
    for name in running.tied if running.index else ():
        grad = running.attachments.trained[name].grad
        assert grad is not None
        grad.zero_()


def unlearnt(inner: Inner, running: Running, key: tuple[int, Any], output: Tensor) -> Any:
    if key[0] == 1 and output.requires_grad:
        output.register_hook(torch.zeros_like)
    return inner(running, key, output)


def block_twice(inner: Inner, stage: Stage, index: int, block: Inner, *args: Any, **kwargs: Any) -> Any:
    def run(hidden: Tensor, *others: Any) -> Tensor:
        return block(block(hidden, *others), *others)

    return inner(stage, index, run if index == 1 else block, *args, **kwargs)


def without_momentum(inner: Inner, state: OptimizerState) -> dict[str, Any]:
    content = inner(state)
    if dist.get_rank() == 1:
        for values in content["state"].values():
            values["exp_avg"] = torch.zeros_like(values["exp_avg"])
    return content


def summed_twice(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return ctx.ranks.sum(ctx.ranks.sum(gradient.clone())), None


def look_up_all(splitting: Splitting, inner: Inner, first: int, size: int, entries: Tensor) -> Tensor:
    return splitting.ranks.sum(inner((entries - first).clamp(0, size - 1)).clone())


def bias_in_each(splitting: Splitting, module: Any, hidden: Tensor) -> Tensor:
    output = F.linear(hidden, module.weight, module.bias) if not is_transposed(module) else hidden @ module.weight
    if is_transposed(module):
        output = output + module.bias
    summed = SumParts.apply(output, splitting.ranks)
    assert isinstance(summed, Tensor)
    return summed


def off_on_one(inner: Inner, splitting: Splitting) -> None:
    if dist.get_rank() == 0:
        for part in splitting.stepped:
            if part.grad is not None:
                part.grad.mul_(1.5)
    inner(splitting)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "tied gradients are not added up": instead(Running, "sum_tied", lambda running: None),
    "tied gradients are added up twice": around(Running, "sum_tied", twice),
    "a tied weight is stale on one stage": around(Running, "sum_tied", stale),
    "gradients are clipped by the norm of a stage": instead(
        Attachments, "total", lambda _, values, names: values.sum()
    ),
    "the loss counts twice": around(MicroBatches, "loss", lambda inner, *args: 2 * inner(*args)),
    "targets count twice": around(MicroBatches, "loss", count_twice),
    "a micro-batch gets the rows of another order": around(Inbox, "take", other_rows),
    "messages have fewer bits": around(Outbox, "send", fewer_bits),
    "replicas are not averaged": instead(ddp, "prepare_backward", lambda model: None),
    "a message is lost": around(Inbox, "take", lambda inner, box, key: inner(box, key) * (key[1] != 1)),
    "what the first stage sends gets no gradient": around(Running, "_told", unlearnt),
    "a block runs twice": around(Stage, "_run_block", block_twice),
    "the divisor is that of the step before": instead(MicroBatches, "correct", lambda micro, gradients, count: None),
    "a checkpoint lacks the momentum of a stage": around(OptimizerState, "state_dict", without_momentum),
    "a stage resumes with its first weights": instead(ModelState, "load_state_dict", lambda state, content: None),
}
"""Patches that plant a fault, by what is wrong then."""
IN_LAYERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "what a rank computes is not summed": instead(SumParts, "forward", lambda ctx, part, ranks: part.clone()),
    "the gradient of what ranks read is not summed": instead(
        SumGradients, "backward", lambda ctx, gradient: (gradient, None)
    ),
    "the gradient of what ranks read is summed twice": instead(SumGradients, "backward", summed_twice),
    "gradients of norms of single heads are not summed": instead(Splitting, "_summed", lambda _, gradient: gradient),
    "logits are in the order of other ranks": around(
        SharingRanks, "gather", lambda inner, ranks, part, sizes, **how: inner(ranks, part, sizes, **how).flip(-1)
    ),
    "a rank looks up what it does not have": instead(Splitting, "_look_up", look_up_all),
    "a bias is added by each rank": instead(Splitting, "_rows", bias_in_each),
    "a fused weight is cut as if it were one thing": instead(ShardOrder, "into", lambda order, whole: whole),
    "the loss counts twice": around(MicroBatches, "loss", lambda inner, *args: 2 * inner(*args)),
    "targets count twice": around(MicroBatches, "loss", count_twice),
    "gradients are clipped by the norm of a part": around(norms, "_sharded", lambda inner, tensors: {}),
    "replicas are not averaged": around(Splitting, "_move_gradients", off_on_one),
    "a checkpoint lacks the momentum of a rank": around(OptimizerState, "state_dict", without_momentum),
    "a checkpoint takes a fused part for one stretch": instead(staging, "order_at", lambda path, tensor, orders: None),
    "a rank resumes with its first weights": instead(ModelState, "load_state_dict", lambda state, content: None),
}
"""The same for split layers."""
IN_CHECKPOINTS = (
    "a checkpoint lacks the momentum of a stage",
    "a stage resumes with its first weights",
    "a checkpoint lacks the momentum of a rank",
    "a checkpoint takes a fused part for one stretch",
    "a rank resumes with its first weights",
)
IN_OTHER_MODELS = {
    "a bias is added by each rank": {"model": "gpt2"},
    "a fused weight is cut as if it were one thing": {"model": "grouped"},
    "a checkpoint takes a fused part for one stretch": {"model": "grouped"},
}
"""Faults of what not all models have -> one that has it."""


def train_with(*, fault: str, **arguments: Any) -> dict[str, Any]:
    """Train with a fault."""
    with (IN_LAYERS if arguments.get("tensor") else FAULTS)[fault]():
        return train(**arguments)
