"""One-shot pruning without training: by magnitude, or by Wanda (Sun et al., 2024).

Wanda keeps the weights with the largest |W_ij| · ‖X_j‖, where X_j is input j of the layer over all calibration tokens.
Blocks are pruned in order, so that the inputs of a block are measured with all earlier blocks pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.core.task import Batch, Forward, call_model
from shoestring.models.blocks import is_in_block, repeated
from shoestring.sparse.layers import choose
from shoestring.sparse.masks import kept_energy, prune, row_mask

Metric = Literal["magnitude", "wanda"]


@dataclass
class PruningResult:
    """Names of the linear layers that were pruned to 2:4, and how much of their weights was kept."""

    kept_energy: dict[str, float] = field(default_factory=dict)
    """Maps each pruned layer to the fraction of the weight's sum of squares that the mask keeps."""
    dense: dict[str, str] = field(default_factory=dict)
    """Maps each selected layer that stays dense to the reason."""
    others: list[str] = field(default_factory=list)
    """Layers that were not selected."""
    share: float = 0.0
    """Fraction of the weights of all linear layers that is in pruned layers."""


@torch.no_grad()
def prune_model(
    model: nn.Module,
    layers: Sequence[str] = (),
    *,
    metric: Metric = "magnitude",
    batches: Sequence[Batch] = (),
    forward: Forward | None = None,
) -> PruningResult:
    """See `sparse.prune`."""
    choice = choose(model, layers, rows_too=False, default=is_in_block)
    if not choice.sparse:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(choice.dense.items())[:3])
        hint = f"name layers by patterns; there are {choice.examples}"
        raise ConfigError(f"no linear layer of {type(model).__name__} can be pruned {reasons}".rstrip(), hint=hint)
    if metric == "wanda" and not batches:
        raise ConfigError("the metric `wanda` needs batches to measure inputs", hint="give some, or prune by magnitude")
    result = PruningResult({}, choice.dense, list(choice.rest), choice.share)
    for block, group in _groups(model, choice.sparse):
        norms = (
            input_norms(model, group, batches, until=block, forward=forward or call_model) if metric == "wanda" else {}
        )
        for name, layer in group.items():
            weight = layer.weight
            # An expert that received no token has no inputs to measure, so its weights are pruned by magnitude.
            scores = weight.to(norms[name]) * norms[name] if name in norms and norms[name].any() else weight
            mask = row_mask(scores)
            result.kept_energy[name] = float(kept_energy(weight, mask))
            weight.copy_(prune(weight, mask))
    return result


def _groups(model: nn.Module, layers: dict[str, nn.Linear]) -> Iterator[tuple[nn.Module, dict[str, nn.Linear]]]:
    """Yield (block, layers in the block) in the order of the blocks, then (model, layers outside all blocks)."""
    remaining = dict(layers)
    for block in repeated(model):
        inside = set(block.modules())
        group = {name: layer for name, layer in remaining.items() if layer in inside}
        remaining = {name: layer for name, layer in remaining.items() if name not in group}
        if group:
            yield block, group
    if remaining:
        yield model, remaining


@torch.no_grad()
def input_norms(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Sequence[Batch],
    *,
    until: nn.Module,
    forward: Forward = call_model,
) -> dict[str, Tensor]:
    """The norm ‖X_j‖ of each input of each layer over all tokens of the batches; (columns,), in fp32 or wider.

    Args:
        until: the module that contains the layers; forward passes stop after it.
    """

    def add_squares(total: Tensor, layer: nn.Module, args: tuple[Any, ...]) -> None:
        total.add_(args[0].to(total).square().flatten(0, -2).sum(0))

    def stop(*_: object) -> None:
        raise _DoneError

    squares = {}
    with ExitStack() as stack:
        for name, layer in layers.items():
            wide = torch.promote_types(layer.weight.dtype, torch.float32)
            squares[name] = torch.zeros(layer.in_features, dtype=wide, device=layer.weight.device)
            stack.callback(layer.register_forward_pre_hook(partial(add_squares, squares[name])).remove)
        stack.callback(until.register_forward_hook(stop).remove)
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        for batch in batches:
            with suppress(_DoneError):
                forward(model, batch)
    return {name: total.sqrt() for name, total in squares.items()}


class _DoneError(Exception):
    """Raised to end a forward pass once all layers have been measured."""
