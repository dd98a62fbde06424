"""One low-rank adapter: what it adds to its layer's output, and how it is merged into the layer's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from shoestring import Attachments

SUFFIX = "_adapter"


class Adapter(nn.Module):
    """x (..., in) -> scale · x Aᵀ Bᵀ (..., out); zero at first, for B is."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        down = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        self.down = nn.Parameter(down.to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        self.scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(inputs, self.down), self.up) * self.scale


def adapt(attachments: Attachments, name: str, layer: nn.Linear, *, rank: int, scale: float) -> None:
    """Add an adapter beside `layer`, under its name and a suffix, until the job is closed."""
    path, _, last = name.rpartition(".")
    parent = attachments.module.get_submodule(path)
    adapter = Adapter(layer, rank, scale, seed=sum(name.encode()))
    parent.add_module(last + SUFFIX, adapter)
    attachments.exits.callback(delattr, parent, last + SUFFIX)
    own = layer.forward
    attachments.patch(layer, lambda inputs: own(inputs) + adapter(inputs))


def merge(weights: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The weights without adapters, each of which is added to the weight of its layer."""
    merged = {name: weight for name, weight in weights.items() if f"{SUFFIX}." not in name}
    for name, up in weights.items():
        if name.endswith(f"{SUFFIX}.up"):
            layer = name.removesuffix(f"{SUFFIX}.up")
            down = weights[f"{layer}{SUFFIX}.down"]
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + scale * (up @ down)
    return merged
