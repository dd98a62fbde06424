"""Low-rank adapters beside linear layers whose weights are frozen: LoRA (Hu et al., 2021), DoRA (Liu et al., 2024).

A layer W (N, K) with an adapter A (r, K), B (N, r) of the scale s computes (W + s B A) x. DoRA gives each row of that
matrix a length m of its own, which is trained: m ∘ (W + s B A) / ‖W + s B A‖ x, the norm of each row counting as a
constant in the backward pass (section 4.3 of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.errors import CheckpointError
from shoestring.models import quantized
from shoestring.models.blocks import is_transposed
from shoestring.models.nf4 import NF4Linear
from shoestring.models.rounding import wide

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""The names of a layer's parameters that an adapter adds."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """The adapter of one layer: `a` (r, K), `b` (N, r), and DoRA's lengths of rows (N,)."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.a, self.b] if self.magnitude is None else [self.a, self.b, self.magnitude]

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        a, b, *magnitude = (tensor.to(device, dtype) for tensor in self.tensors)
        return LowRank(a, b, self.scale, *magnitude)

    def merged(self, weight: Tensor) -> Tensor:
        """The weight (N, K) of a plain layer that computes the same, of the type of `weight`."""
        exact = wide(weight.dtype)
        whole = weight.to(exact) + self.scale * (self.b.to(exact) @ self.a.to(exact))
        if self.magnitude is not None:
            whole *= (self.magnitude.to(exact) / torch.linalg.vector_norm(whole, dim=1))[:, None]
        return whole.to(weight.dtype)


def fresh(shape: tuple[int, int], rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """A as `nn.Linear` draws its weight, from a seed of its own, and B of zeros: the layer begins unchanged."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    bound = shape[1] ** -0.5
    return (torch.rand(rank, shape[1], generator=generator) * 2 - 1) * bound, torch.zeros(shape[0], rank)


def matrix(layer: nn.Module) -> Tensor:
    """The weight (N, K) of a linear layer, dequantised where it is quantised."""
    if isinstance(layer, quantized.Quantized | NF4Linear):
        return layer.dense()
    weight: Any = layer.weight
    return weight.T if is_transposed(layer) else weight


class Adapted:
    """What a layer with an adapter computes; its parameters lie on the layer, under their names above.

    Args:
        forward: the layer's own.
        dropout: share of the inputs of the adapter, and not of the layer's own, that is zeroed in training.
    """

    def __init__(
        self, layer: nn.Module, forward: Callable[[Tensor], Tensor], adapter: LowRank, dropout: float = 0.0
    ) -> None:
        self.layer, self.forward, self.scale, self.dropout = layer, forward, adapter.scale, dropout
        layer.register_parameter(A, nn.Parameter(adapter.a))
        layer.register_parameter(B, nn.Parameter(adapter.b))
        self.squares: Tensor | None = None
        if adapter.magnitude is not None:
            layer.register_parameter(MAGNITUDE, nn.Parameter(adapter.magnitude))
            self.squares = row_norms(matrix(layer).detach(), adapter.a.dtype).square()

    def __call__(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        y = self.forward(x)
        part = F.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x
        low = F.linear(F.linear(part, layer.lora_A.to(x.dtype)), layer.lora_B.to(x.dtype)) * self.scale
        if self.squares is None:
            return y + low
        factor = (layer.lora_magnitude / self._norms(layer)).to(y.dtype)
        plain = y if layer.bias is None else y - layer.bias
        return y + (factor - 1) * plain + factor * low

    def _norms(self, layer: Any) -> Tensor:
        """‖W + s B A‖ of each row, from W Aᵀ and the norms of W, so that nothing of the weight's size is written."""
        assert self.squares is not None
        with torch.no_grad(), torch.autocast(layer.lora_A.device.type, enabled=False):
            a, b = layer.lora_A, layer.lora_B
            crossed = matrix(layer).to(a.dtype) @ a.T  # N r
            squares = self.squares + ((2 * self.scale * crossed + self.scale**2 * (b @ (a @ a.T))) * b).sum(1)
        return squares.clamp_min(0).sqrt()


def row_norms(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """‖w‖ of each row of a weight (N, K), in `dtype`: what DoRA's lengths begin with."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=dtype)


def take_off(layer: nn.Module) -> None:
    """Remove an adapter's parameters from a layer."""
    for name in (A, B, MAGNITUDE):
        layer._parameters.pop(name, None)


def adapters_in(weights: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, LowRank]:
    """The adapters among a model's parameters, by the names of their layers, each with the scale given for it."""
    return {
        layer: LowRank(weights[f"{layer}.{A}"], weights[f"{layer}.{B}"], scale, weights.get(f"{layer}.{MAGNITUDE}"))
        for layer, scale in scales.items()
    }


@torch.no_grad()
def merge(model: nn.Module, adapters: Mapping[str, LowRank]) -> None:
    """Add adapters to the weights of the plain layers of a model that they were read for.

    Raises:
        CheckpointError: a layer is quantised or packed.
    """
    for name, adapter in adapters.items():
        layer: Any = model.get_submodule(name)
        if not isinstance(layer, nn.Linear) and not is_transposed(layer):
            said = f"`{name}` is a {type(layer).__name__}, no plain linear layer"
            raise CheckpointError(said, hint="merge the adapter into the model as it was before it was changed")
        merged = adapter.merged(matrix(layer))
        layer.weight.copy_(merged.T if is_transposed(layer) else merged)
