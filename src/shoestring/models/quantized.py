"""Layers whose weights have 8 or 4 bits, for decoding; `rounding` has the numbers.

Of a 2:4 weight the values alone are numbers, in the same order as any other weight's, and their places are kept beside
them (`packed24`): 5.25 and 3.25 bits a weight in place of 8.5 and 4.5.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native
from shoestring.core.errors import ConfigError
from shoestring.models import packed24, slorb
from shoestring.models.blocks import is_transposed, repeated
from shoestring.models.packed24 import PackedLinear
from shoestring.models.rounding import (
    GROUP,
    LANES,
    ZERO,
    Bits,
    bits_of,
    dequantize,
    pack,
    pack_places,
    quantize,
    unfit,
    unpack_places,
    wide,
)
from shoestring.models.skinny import FEW_ROWS

_BYTES_OF_A_GROUP = 72  # of an input, in the room that the native product works in


# -- products ----------------------------------------------------------------------------------------------------------


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    rows: int,
    bias: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """y = x Wᵀ + bias.

    On a CPU an input of few rows is multiplied by the packed weight in one pass over it, natively: its entries become
    integers of 16 bits, with a scale for each group. All else multiplies by the weight as `dense` returns it; where
    gradients flow to x, the backward pass does so again, so that no dense weight is held in between.

    Args:
        x: (…, K), of any floating type. weight, scales: as `pack` returns them. rows: N. bias: (N,).
        places: of a 2:4 weight, whose values `weight` has, as `pack_places` returns them.

    Returns:
        (…, N), of the type of x.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        y = _operator(x, weight, scales, rows, places)
    else:
        y = _product(x, weight, scales, rows, places)
    return y if bias is None else y + bias


def dense(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
    """The weight (N, K) that packed numbers stand for."""
    values = dequantize(weight, scales, rows, dtype)
    return values if places is None else packed24.unpack(values, unpack_places(places, rows))


def _product(x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None) -> Tensor:
    inputs = _columns(weight, places)
    if x.shape[-1] != inputs:
        raise RuntimeError(f"an input of {x.shape[-1]} features for a layer of {inputs}")
    few = 0 < x.numel() <= FEW_ROWS * inputs
    if few and x.device.type == "cpu" and x.dtype is not torch.float64 and (kernel := _kernel()) is not None:
        return _native(kernel, x, weight, scales, rows, places)
    return F.linear(x, dense(weight, scales, rows, x.dtype, places))


def _columns(weight: Tensor, places: Tensor | None) -> int:
    return weight.shape[1] * GROUP * (1 if places is None else 2)


def _native(kernel: Any, x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None = None) -> Tensor:
    inputs = x.shape[-1]
    count = x.numel() // inputs
    flat = x.detach().float().contiguous()
    y = flat.new_empty((*x.shape[:-1], rows))
    room = weight.new_empty(count * inputs // GROUP * _BYTES_OF_A_GROUP)
    kernel(
        bits_of(weight),
        count,
        rows,
        inputs,
        weight.data_ptr(),
        scales.data_ptr(),
        None if places is None else places.data_ptr(),
        flat.data_ptr(),
        room.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y.to(x.dtype)


@cache
def _kernel() -> Any:
    """The C function; None on a machine that cannot compile it."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, size, size, size, *[pointer] * 6, ctypes.c_int]
    return native.function(
        "skinny_quantized", types, "quantised layers are dequantised for every product, which is slower than dense ones"
    )


@torch.library.custom_op("shoestring::quantized_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None) -> Tensor:
    return _product(x, weight, scales, rows, places)


@_operator.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, Tensor | None], output: Tensor) -> None:
    _, weight, scales, ctx.rows, places = inputs
    ctx.save_for_backward(weight, scales, places)


def _input_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, scales, places = ctx.saved_tensors
    return gradient @ dense(weight, scales, ctx.rows, gradient.dtype, places), None, None, None, None


_operator.register_autograd(_input_gradient, setup_context=_remember)


# -- layers ------------------------------------------------------------------------------------------------------------


class Quantized(nn.Module):
    """A weight (N, K) of 8 or 4 bits."""

    weight: Tensor
    scales: Tensor
    places: Tensor | None

    def __init__(self, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None = None) -> None:
        super().__init__()
        sixteens = -(-rows // LANES)
        fits = weight.dim() == 3 and len(weight) == sixteens and weight.shape[2] in (16 * LANES, 32 * LANES)
        if not fits or scales.shape != (*weight.shape[:2], LANES):
            raise ConfigError(
                f"{tuple(weight.shape)} numbers and {tuple(scales.shape)} scales are no weight of {rows} rows"
            )
        if places is not None and places.shape != (*weight.shape[:2], LANES * GROUP // 4):
            raise ConfigError(f"{tuple(places.shape)} places do not fit {tuple(weight.shape)} numbers")
        self.rows, self.columns = rows, _columns(weight, places)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("places", places)

    @property
    def bits(self) -> Bits:
        return bits_of(self.weight)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that it stands for."""
        return dense(self.weight, self.scales, self.rows, dtype, self.places)

    def extra_repr(self) -> str:
        return f"{self.columns}, {self.rows}, bits={self.bits}{'' if self.places is None else ', 2:4'}"


class QuantizedLinear(Quantized):
    """`nn.Linear` with a quantised weight, for inference."""

    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        rows: int,
        bias: Tensor | None = None,
        places: Tensor | None = None,
    ) -> None:
        super().__init__(weight, scales, rows, places)
        self.out_features, self.in_features = rows, self.columns
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weight, self.scales, self.rows, self.bias, self.places)


class QuantizedEmbedding(Quantized):
    """`nn.Embedding` with a quantised weight, for inference; also the head of a model whose weights are tied."""

    like: Tensor

    def __init__(self, weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(weight, scales, rows)
        # Empty: its type, which casts of the model change, is that of the rows returned.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1)
        sixteen, lane = flat // LANES, flat % LANES
        numbers = self.weight.view(*self.weight.shape[:2], -1, LANES, 4)[sixteen, :, :, lane].flatten(2)
        if self.bits == 4:
            numbers = torch.cat((numbers & 15, numbers >> 4), -1)
        of_rows = self.scales.view(torch.float16)[sixteen, :, lane]
        values = (numbers.to(wide(self.like.dtype)) - ZERO[self.bits]) * of_rows[..., None]
        return values.to(self.like.dtype).view(*tokens.shape, self.columns)

    def logits(self, x: Tensor) -> Tensor:
        """The embedding as the head of the model: (…, K) to (…, N)."""
        return quantized_linear(x, self.weight, self.scales, self.rows)


# -- models ------------------------------------------------------------------------------------------------------------


def matrix(module: nn.Module) -> Tensor | None:
    """The weight (N, K) of a linear layer, packed or not, or an embedding, also of GPT-2's `Conv1D`; else None."""
    if isinstance(module, PackedLinear):
        return packed24.unpack(module.values, module.indices)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    if is_transposed(module):
        return weight.T
    return weight if isinstance(module, nn.Linear | nn.Embedding) else None


def empty(module: nn.Module, bits: Bits) -> Quantized:
    """A quantised layer of the shape and type of `module`, to be loaded into."""
    weight = _numbered(module)
    assert weight is not None
    rows, groups = weight.shape[0], weight.shape[1] // GROUP
    shape = (-(-rows // LANES), groups, LANES)
    numbers = torch.empty(*shape[:2], GROUP * LANES * bits // 8, dtype=torch.uint8, device=weight.device)
    return _layer(module, numbers, torch.empty(shape, dtype=torch.int16, device=weight.device), weight)


def of(module: nn.Module, bits: Bits) -> Quantized:
    """The layer with its weight rounded.

    Raises:
        ConfigError: the weight cannot be quantised.
    """
    weight = _numbered(module)
    assert weight is not None
    return _layer(module, *pack(*quantize(weight, bits), bits), weight)


def _stays24(module: nn.Module) -> TypeGuard[PackedLinear]:
    """Whether a packed layer stays 2:4, which takes fewer bytes: where its values fill groups of their own."""
    return isinstance(module, PackedLinear) and module.values.shape[1] % GROUP == 0


def _numbered(module: nn.Module) -> Tensor | None:
    """What of a layer becomes numbers: its weight, or the values of one that stays 2:4; None of any other module."""
    return module.values if _stays24(module) else matrix(module)


def _layer(module: nn.Module, numbers: Tensor, scales: Tensor, weight: Tensor) -> Quantized:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(numbers, scales, weight.shape[0], weight.dtype)
    bias, places = getattr(module, "bias", None), pack_places(module.indices) if _stays24(module) else None
    return QuantizedLinear(numbers, scales, weight.shape[0], None if bias is None else bias.detach(), places)


def choose(model: nn.Module, bits: Bits) -> tuple[dict[str, Bits], dict[str, str]]:
    """The layers to quantise: linear ones of the blocks to `bits`; embeddings and all else outside of blocks to 8.

    Returns:
        Their names with their bits, and the names of those that stay as they are with why.
    """
    inside = {module for block in repeated(model) for module in block.modules()}
    chosen: dict[str, Bits] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        weight = matrix(module)
        if weight is None:
            continue
        why = unfit(weight)
        if isinstance(module, nn.Embedding) and _is_of_positions(model, module):
            why = "it is of positions"
        if why:
            left[name] = why
        else:
            chosen[name] = bits if module in inside else 8
    return chosen, left


def _is_of_positions(model: nn.Module, embedding: nn.Embedding) -> bool:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", embedding.num_embeddings)
    return embedding.num_embeddings != vocabulary


def replace(model: nn.Module, bits: Mapping[str, Bits], *, rounded: bool = False) -> None:
    """Put quantised layers in the place of those that are named; those that share a weight share it still.

    Args:
        rounded: with the weights rounded; by default empty, for `load_state_dict` to fill.
    """
    made: dict[int, Quantized] = {}
    for name, width in bits.items():
        module = model.get_submodule(name)
        weight = _numbered(module)
        if weight is None:
            raise ConfigError(f"`{name}` is a {type(module).__name__}, neither a linear layer nor an embedding")
        key = id(getattr(module, "weight", module))
        if (other := made.get(key)) is not None:
            layer = _layer(module, other.weight, other.scales, weight)
        else:
            layer = made[key] = of(module, width) if rounded else empty(module, width)
        slorb.carry_over(module, layer)
        model.set_submodule(name, layer)


def quantized(model: nn.Module) -> dict[str, Bits]:
    """The names of the layers that are quantised, with their bits."""
    return {name: module.bits for name, module in model.named_modules() if isinstance(module, Quantized)}


def packed(model: nn.Module) -> list[str]:
    """The names of the layers that are quantised and 2:4."""
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, Quantized) and module.places is not None]
