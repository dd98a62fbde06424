"""Counts the bytes that a pass over one token moves: weights, and the keys and values of the context.

Decoding a single text is bandwidth-bound, so its time is proportional to these bytes. With a longer context, an
attention sublayer moves more bytes and a feed-forward sublayer does not, so the best choice depends on the context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shoestring.decode.adapter import Adapter, Pretrained, adapt
from shoestring.models.gpt import GPT
from shoestring.models.sublayers import sublayers


@dataclass(frozen=True)
class Cost:
    """The bytes that a sublayer moves for one token."""

    weights: int
    """Bytes of the weights of the sublayer and of its norms."""
    position: int = 0
    """Bytes of the keys and values of one position of the context; 0 in a feed-forward sublayer."""
    window: int | None = None
    """Largest number of positions that the sublayer attends to, if it has a sliding window; None if it attends to
    all."""

    def at(self, context: int) -> int:
        """Bytes moved for one token that follows `context` earlier tokens."""
        return self.weights + self.position * (context if self.window is None else min(context, self.window))


@dataclass(frozen=True)
class Costs:
    """The bytes that a model moves for one token."""

    sublayers: dict[str, Cost]
    rest: int
    """Bytes of all other weights that a token needs: output layer and norms, but not embeddings that are only looked
    up."""

    def total(self, context: int) -> int:
        """Bytes moved for one token that follows `context` earlier tokens."""
        return self.rest + sum(cost.at(context) for cost in self.sublayers.values())


@torch.no_grad()
def count_bytes(model: nn.Module | Adapter) -> Costs:
    """Count the bytes that each sublayer of a model moves per token, in the data types of its weights. For the count,
    the model reads one token.

    Raises:
        ConfigError: the sublayers of the model are not supported; see `shoestring.models.sublayers`.
    """
    adapter = model if isinstance(model, Adapter) else adapt(model)
    known, cache = sublayers(adapter.model), adapter.new_cache(1, 1)
    adapter.read(torch.zeros(1, 1, dtype=torch.int64), cache)
    passes = adapter.passes if isinstance(adapter, Pretrained) else None
    window, kinds = (passes.window, passes.kinds) if passes else (None, [])
    costs, inside = {}, set[int]()
    for name, sublayer in known.items():
        tensors = [
            tensor
            for module in (name, *sublayer.norms)
            for held in (adapter.model.get_submodule(module),)
            for tensor in (*held.parameters(), *held.buffers())
        ]
        inside.update(map(id, tensors))
        position = 0
        if sublayer.kind == "attention":
            position = sum(held[0, :, 0].nbytes for held in cache.layers.get(sublayer.layer, ()))
        slides = window and (not kinds or kinds[sublayer.layer] == "sliding_attention")
        costs[name] = Cost(sum(tensor.nbytes for tensor in tensors), position, window if slides else None)
    return Costs(costs, sum(tensor.nbytes for tensor in _others(adapter.model) if id(tensor) not in inside))


def _others(model: nn.Module) -> list[torch.Tensor]:
    """The weights of a model, each listed once, without embedding tables that are only looked up. An embedding table
    that is also the output layer is listed, because each token reads all of it."""
    tied = isinstance(model, GPT) and model.head is None
    used = {
        id(parameter)
        for module in model.modules()
        if tied or not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return [parameter for parameter in model.parameters() if id(parameter) in used]
