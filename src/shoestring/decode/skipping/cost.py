"""The bytes that a pass over one token moves: weights, and the keys and values of the context.

A decoder of one text is bound by memory bandwidth, so these are also its time. An attention sublayer gets dearer with
the context, a feed-forward sublayer does not; so which of them to skip depends on the context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shoestring.decode.adapter import Adapter, adapt
from shoestring.models.gpt import GPT
from shoestring.models.sublayers import sublayers


@dataclass(frozen=True)
class Cost:
    """What a sublayer moves."""

    weights: int
    """Bytes of its weights, and of its norms'."""
    position: int = 0
    """Bytes of the keys and values of one position of the context."""
    window: int | None = None
    """The most positions that it attends to, where the model has a sliding window."""

    def at(self, context: int) -> int:
        """Bytes moved for one token after `context` others."""
        return self.weights + self.position * (context if self.window is None else min(context, self.window))


@dataclass(frozen=True)
class Costs:
    """What a model moves for one token."""

    sublayers: dict[str, Cost]
    rest: int
    """Bytes of all other weights that a token needs: the output layer and norms, not the embedding's look-up."""

    def total(self, context: int) -> int:
        return self.rest + sum(cost.at(context) for cost in self.sublayers.values())


@torch.no_grad()
def count_bytes(model: nn.Module | Adapter) -> Costs:
    """What each sublayer of a model moves, as its weights are stored; lets the model read one token.

    Raises:
        ConfigError: the sublayers of the model are not known; see `shoestring.models.sublayers`.
    """
    adapter = model if isinstance(model, Adapter) else adapt(model)
    known, cache = sublayers(adapter.model), adapter.new_cache(1, 1)
    adapter.read(torch.zeros(1, 1, dtype=torch.int64), cache)
    window = getattr(adapter, "window", None)
    kinds: list[str] = getattr(adapter, "kinds", [])
    found, inside = {}, set[int]()
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
        found[name] = Cost(sum(tensor.nbytes for tensor in tensors), position, window if slides else None)
    return Costs(found, sum(each.nbytes for each in _others(adapter.model) if id(each) not in inside))


def _others(model: nn.Module) -> list[torch.Tensor]:
    """The weights of a model that products read, each once: not what embeddings only look up."""
    tied = isinstance(model, GPT) and model.head is None
    used = {
        id(parameter)
        for module in model.modules()
        if tied or not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return [parameter for parameter in model.parameters() if id(parameter) in used]
