"""Losses that compare the samples of a batch with each other, over all ranks and micro-batches of a step.

Every rank computes the same loss on all rows: its own rows, which have gradients, and the rows of other ranks, which it
treats as constants. The gradients of a rank's own rows are then complete, so nothing is exchanged in the backward pass.
Micro-batches run twice (Gao et al., 2021, "Scaling deep contrastive learning batch size under memory limited setup").
The first pass, without gradients, computes all outputs, the loss of the whole batch, and the loss's gradient with
respect to the outputs. The second pass backpropagates this gradient through one micro-batch after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import tree_leaves, tree_map_only
from shoestring.core.errors import ConfigError
from shoestring.core.kept import RandomState
from shoestring.core.task import Batch, Loss, Output
from shoestring.core.trace import span

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.step import MicroBatches

_MARK = "whole_batch"


def whole_batch(loss: Loss) -> Loss:
    """Mark a loss that compares samples with each other, so that it gets the rows of all ranks and micro-batches.

    Write the loss as for one process. Its argument `output` is what `forward` returns for the whole batch of the step:
    tensors, or a tuple, list or dict of tensors, with one row per sample; the rows of all ranks are joined. 0-d
    tensors, such as a temperature, are equal on all ranks and stay as they are. The argument `batch` is a dict of only
    those entries of the batch that hold one number per sample, of shape (samples,). If the loss needs anything else,
    `forward` may return it. Gradients flow only through what `forward` returns.
    """
    setattr(loss, _MARK, True)
    return loss


def is_over_whole_batch(attachments: Attachments) -> bool:
    """Whether the loss of a job was marked by `whole_batch`."""
    return getattr(attachments.task_loss, _MARK, False)


def joined(
    output: Output, batch: Batch, group: dist.ProcessGroup | None, *, repeated: bool = False
) -> tuple[Output, Batch]:
    """Join a rank's rows with those of the other ranks of a group, in the order of ranks. A collective.

    Args:
        group: ranks whose gradients are averaged; None for one rank.
        repeated: whether this rank's rows are copies that another rank counts, so that they must be left out.

    Raises:
        ConfigError: an output has no rows, or rows of a different shape on another rank; raised on all ranks.
    """
    numbers = _numbers(batch)
    own = [tensor for tensor in tree_leaves((output, numbers)) if isinstance(tensor, Tensor) and tensor.ndim]
    if not any(isinstance(tensor, Tensor) and tensor.ndim for tensor in tree_leaves(output)):
        raise ConfigError(
            f"the forward pass returned a {type(output).__name__} without rows, and the loss is over the whole batch",
            hint="return a tensor, or a tuple, list or dict of tensors, with a row for each sample",
        )
    if group is None:
        return output, numbers
    shapes = torch.tensor([(0 if repeated else len(rows), rows[:1].numel()) for rows in own], device=own[0].device)
    by_rank = _gathered(shapes, group)
    if any((shape[:, 1] != by_rank[0][:, 1]).any() for shape in by_rank):
        raise ConfigError(
            "rows of the outputs have different sizes on different ranks, and the loss is over the whole batch",
            hint="let run.forward return rows of the same size on all ranks",
        )
    lengths = [shape[:, 0].tolist() for shape in by_rank]
    parts = (_joined(rows, [of_rank[index] for of_rank in lengths], group) for index, rows in enumerate(own))
    share = 1 / dist.get_world_size(group)

    def place(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            return next(parts)
        # The value stays, and its gradient is multiplied by `share`, because every rank computes the full gradient.
        return tensor.detach() + (tensor - tensor.detach()) * share if tensor.requires_grad else tensor

    return tree_map_only(Tensor, place, (output, numbers))


def _numbers(batch: Batch) -> dict[str, Tensor]:
    """The entries of a batch with one number per sample; empty if the batch is not a mapping."""
    entries = batch.items() if isinstance(batch, Mapping) else ()
    return {name: value for name, value in entries if isinstance(value, Tensor) and value.ndim == 1}


def _joined(own: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks; only this rank's own rows carry gradients."""
    rank, padded = dist.get_rank(group), own.detach().new_zeros(max(lengths), *own.shape[1:])
    padded[: lengths[rank]] = own.detach()[: lengths[rank]]
    parts = [part[:length] for part, length in zip(_gathered(padded, group), lengths, strict=True)]
    parts[rank] = own[: lengths[rank]]
    return torch.cat(parts)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with span("outputs", "wire", tensor.nbytes):
        dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def run_in_two_passes(micro: MicroBatches) -> None:
    """Run the micro-batches of a step whose loss spans all of them.

    Random states and buffers are restored before the second pass, so that it computes the same outputs as the first.
    """
    attachments = micro.attachments
    buffers = [(buffer, buffer.clone()) for buffer in attachments.module.buffers()]
    generators, states = RandomState(attachments.world.device), []
    parts: list[Output] = []
    with torch.no_grad(), span("forward", "compute"):
        for batch in micro.batches:
            states.append(generators.state_dict())
            with micro.computing():
                parts.append(tree_map_only(Tensor, _leaf, micro.forward(batch)))
        for buffer, before in buffers:
            buffer.copy_(before)
    with micro.computing():
        loss = micro.loss(_concatenated(parts), _concatenated([_numbers(batch) for batch in micro.batches]))
    micro.begin_sum()
    with span("backward", "compute"):
        loss.backward()
    for index, (batch, state) in enumerate(zip(micro.batches, states, strict=True)):
        generators.load_state_dict(state)
        leaves = [leaf for leaf in tree_leaves(parts[index]) if isinstance(leaf, Tensor)]
        with micro.sync(index == len(micro.batches) - 1):
            with micro.computing(), span("forward", "compute"):
                outputs = [leaf for leaf in tree_leaves(micro.forward(batch)) if isinstance(leaf, Tensor)]
            pairs = [
                (output, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                for output, leaf in zip(outputs, leaves, strict=True)
                if output.requires_grad
            ]
            with span("backward", "compute"):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _concatenated(parts: list[Any]) -> Any:
    """Join the outputs of micro-batches along their rows; 0-d tensors are taken from the first micro-batch."""
    columns = zip(*(tree_leaves(part) for part in parts), strict=True)
    values = (
        torch.cat(column) if isinstance(column[0], Tensor) and column[0].ndim else column[0] for column in columns
    )
    return tree_map_only(Tensor, lambda _: next(values), parts[0])
