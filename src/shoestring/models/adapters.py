"""Low-rank adapters of linear layers with frozen weights: LoRA (Hu et al., 2021), DoRA (Liu et al., 2024).

A layer with weight W (N, K) and an adapter with factors A (r, K) and B (N, r) and scale s computes (W + s B A) x. DoRA
also trains the norm m of each row: m ∘ (W + s B A) / ‖W + s B A‖ x. The backward pass treats the norm in the
denominator as a constant (section 4.3 of the DoRA paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
"""Names of the parameters that an adapter adds to a layer."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """The adapter of one layer: factors `a` (r, K) and `b` (N, r), and DoRA's magnitude of each row (N,)."""

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
        """The weight (N, K) with the adapter merged into it, in the data type of `weight`."""
        exact = wide(weight.dtype)
        whole = weight.to(exact) + self.scale * (self.b.to(exact) @ self.a.to(exact))
        if self.magnitude is not None:
            whole *= (self.magnitude.to(exact) / torch.linalg.vector_norm(whole, dim=1))[:, None]
        return whole.to(weight.dtype)


def fresh(shape: tuple[int, int], rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Initial factors of an adapter: A is drawn like the weight of `nn.Linear`, from `seed`; B is zero, so that the
    layer's output is unchanged at first."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    bound = shape[1] ** -0.5
    return (torch.rand(rank, shape[1], generator=generator) * 2 - 1) * bound, torch.zeros(shape[0], rank)


def matrix(layer: nn.Module) -> Tensor:
    """The weight (N, K) of a linear layer, dequantised if necessary."""
    if isinstance(layer, quantized.Quantized | NF4Linear):
        return layer.dense()
    weight: Any = layer.weight
    return weight.T if is_transposed(layer) else weight


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """The shape (N, K) of a linear layer's weight; quantised weights are not dequantised."""
    if isinstance(layer, quantized.QuantizedLinear | NF4Linear):
        return layer.out_features, layer.in_features
    rows, columns = matrix(layer).shape
    return rows, columns


class Adapted:
    """The forward pass of a layer with an adapter; registers the adapter's parameters on the layer.

    Args:
        forward: the layer's own forward pass.
        dropout: probability with which training zeroes an input of the adapter; the layer's own input is not affected.
    """

    def __init__(
        self, layer: nn.Module, forward: Callable[[Tensor], Tensor], adapter: LowRank, dropout: float = 0.0
    ) -> None:
        self.layer, self.forward, self.scale, self.dropout = layer, forward, adapter.scale, dropout
        layer.register_parameter(A, nn.Parameter(adapter.a))
        layer.register_parameter(B, nn.Parameter(adapter.b))
        self.off = False
        self.squares: Tensor | None = None  # squared norms of the rows of W, for DoRA
        if adapter.magnitude is not None:
            layer.register_parameter(MAGNITUDE, nn.Parameter(adapter.magnitude))
            self.squares = row_norms(matrix(layer).detach(), adapter.a.dtype).square()

    def __call__(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        y = self.forward(x)
        if self.off:
            return y
        part = F.dropout(x, self.dropout, layer.training)
        inner, b = F.linear(part, layer.lora_A.to(x.dtype)), layer.lora_B.to(x.dtype)
        if self.squares is None and y.ndim > 1 and y.dtype is inner.dtype is b.dtype:
            # `addmm` adds the product to y; separate operations would read and write y two more times.
            whole = torch.addmm(y.flatten(0, -2), inner.flatten(0, -2), b.T, alpha=self.scale)
            return whole.view(y.shape)
        low = F.linear(inner, b) * self.scale
        if self.squares is None:
            return y + low
        # The squared norm ‖W + s B A‖² of each row. Expanding the square needs only W Aᵀ and the norms of W, so no
        # matrix of the weight's size is allocated.
        with torch.no_grad(), torch.autocast(layer.lora_A.device.type, enabled=False):
            a, exact_b = layer.lora_A, layer.lora_B
            crossed = matrix(layer).to(a.dtype) @ a.T  # N r
            added = ((2 * self.scale * crossed + self.scale**2 * (exact_b @ (a @ a.T))) * exact_b).sum(1)
            squares = self.squares + added
        factor = (layer.lora_magnitude / squares.clamp_min(0).sqrt()).to(y.dtype)
        plain = y if layer.bias is None else y - layer.bias
        return y + (factor - 1) * plain + factor * low


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which adapted layers compute their output without their adapters."""
    adapted = [forward for layer in model.modules() if isinstance(forward := vars(layer).get("forward"), Adapted)]
    for layer in adapted:
        layer.off = True
    try:
        yield
    finally:
        for layer in adapted:
            layer.off = False


def row_norms(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm ‖w‖ of each row of a weight (N, K), in `dtype`; these are DoRA's initial magnitudes."""
    wider = torch.promote_types(weight.dtype, dtype)  # torch cannot compute a norm in a type narrower than the weight's
    return torch.linalg.vector_norm(weight, dim=1, dtype=wider).to(dtype)


def take_off(layer: nn.Module) -> None:
    """Remove an adapter's parameters from a layer."""
    for name in (A, B, MAGNITUDE):
        layer._parameters.pop(name, None)


def adapters_in(weights: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, LowRank]:
    """The adapters among a model's parameters, by layer name; `scales` names the layers and their scales."""
    return {
        layer: LowRank(weights[f"{layer}.{A}"], weights[f"{layer}.{B}"], scale, weights.get(f"{layer}.{MAGNITUDE}"))
        for layer, scale in scales.items()
    }


@torch.no_grad()
def merge(model: nn.Module, adapters: Mapping[str, LowRank]) -> None:
    """Add adapters to the weights of a model's plain linear layers.

    Raises:
        CheckpointError: a layer is quantised or packed.
    """
    for name, adapter in adapters.items():
        layer: Any = model.get_submodule(name)
        if not isinstance(layer, nn.Linear) and not is_transposed(layer):
            raise CheckpointError(
                f"`{name}` is a {type(layer).__name__}, not a plain linear layer",
                hint="merge the adapter into the original model, whose layers are not quantised or packed",
            )
        merged = adapter.merged(matrix(layer))
        layer.weight.copy_(merged.T if is_transposed(layer) else merged)
