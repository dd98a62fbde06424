"""Layers with 8-bit or 4-bit weights, for decoding, in the number format of `rounding`.

For a 2:4 weight, only the stored values are quantised, in the same layout as dense weights; their places are stored as
well (see `packed24`). This takes 5.25 or 3.25 bits a weight instead of 8.5 or 4.5.
"""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native
from shoestring.core.errors import ConfigError
from shoestring.models import packed24, slorb
from shoestring.models.blocks import is_transposed, read_by_others, repeated, routers
from shoestring.models.packed24 import PackedLinear
from shoestring.models.plain_layers import is_product, scale_of
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

_BYTES_OF_A_GROUP = 72  # bytes of workspace for each group of inputs, in products of few rows
_BYTES_OF_A_PANEL = 34  # bytes of workspace for each input and thread, in products of many rows
_WITHOUT_KERNEL = "quantised layers are dequantised for every product, which is slower than dense ones"


# -- products ----------------------------------------------------------------------------------------------------------


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    rows: int,
    bias: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Compute y = x Wᵀ + bias for a quantised weight W.

    On a CPU, native kernels round the inputs to 16-bit integers, with a scale for each group, and multiply them by the
    packed weight: few rows in one pass over the weight, many rows in blocks. A row of y is bitwise independent of the
    number of other rows. In training and under torch.compile, more than `FEW_ROWS` rows are multiplied by the
    dequantised weight with `F.linear`, as are all rows if the kernels cannot be used. The backward pass dequantises
    again, so no dense weight is kept in memory between the passes.

    Args:
        x: (…, K), of any floating type. weight, scales: as `pack` returns them. rows: N. bias: (N,).
        places: for a 2:4 weight, the places of the values in `weight`, as `pack_places` returns them; None for a dense
            weight.

    Returns:
        (…, N), of the type of x.
    """
    fake = type(weight) is not Tensor  # a fake tensor has no address that a kernel could read from
    if fake or torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        y = _operator(x, weight, scales, rows, places)
    else:
        y = _product(x, weight, scales, rows, places, most=None)
    return y if bias is None else y + bias


def dense(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
    """The dequantised weight (N, K)."""
    values = dequantize(weight, scales, rows, dtype)
    return values if places is None else packed24.unpack(values, unpack_places(places, rows))


def _product(
    x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None, most: int | None = FEW_ROWS
) -> Tensor:
    """Compute x Wᵀ.

    Args:
        most: largest number of rows of x that are rounded to integers; None for no limit.
    """
    inputs = _columns(weight, places)
    if x.shape[-1] != inputs:
        raise RuntimeError(f"an input of {x.shape[-1]} features for a layer of {inputs}")
    count = x.numel() // inputs
    if x.device.type == "cpu" and x.dtype is not torch.float64 and 0 < count <= (most or count):
        name = "skinny_quantized" if count <= few_rows(places is None) else "blocked_quantized"
        if (product := kernel(name)) is not None:
            return _native(product, x, weight, scales, rows, places)
    return F.linear(x, dense(weight, scales, rows, x.dtype, places))


def _columns(weight: Tensor, places: Tensor | None) -> int:
    return weight.shape[1] * GROUP * (1 if places is None else 2)


def _native(product: Any, x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None = None) -> Tensor:
    inputs = x.shape[-1]
    count = x.numel() // inputs
    flat = x.detach().float().contiguous()
    y = flat.new_empty((*x.shape[:-1], rows))
    threads = torch.get_num_threads()
    workspace = weight.new_empty(room(count, inputs))
    product(
        bits_of(weight),
        count,
        rows,
        inputs,
        weight.data_ptr(),
        scales.data_ptr(),
        None if places is None else places.data_ptr(),
        flat.data_ptr(),
        workspace.data_ptr(),
        y.data_ptr(),
        threads,
    )
    return y.to(x.dtype)


def room(count: int, inputs: int) -> int:
    """Bytes of workspace that a product takes, for `count` rows with `inputs` elements each."""
    return count * inputs // GROUP * _BYTES_OF_A_GROUP + torch.get_num_threads() * inputs * _BYTES_OF_A_PANEL


@cache
def few_rows(dense: bool) -> int:
    """Largest number of rows for which the kernel for few rows is the faster of the two kernels on this processor."""
    try:
        return native.load("skinny_quantized").few_rows(not dense)
    except native.CompileError:
        return FEW_ROWS


@cache
def kernel(name: str) -> Any:
    """The C function of this name, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    return native.function(name, [ctypes.c_int, size, size, size, *[pointer] * 6, ctypes.c_int], _WITHOUT_KERNEL)


@torch.library.custom_op("shoestring::quantized_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None) -> Tensor:
    return _product(x, weight, scales, rows, places)


@_operator.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, Tensor | None], output: Tensor) -> None:
    _, weight, scales, ctx.rows, places = inputs
    ctx.save_for_backward(weight, scales, places)


def _input_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, scales, places = ctx.saved_tensors
    return gradient @ dense(weight, scales, ctx.rows, gradient.dtype, places), None, None, None, None


_operator.register_autograd(_input_gradient, setup_context=_setup_context)


# -- layers ------------------------------------------------------------------------------------------------------------


class Quantized(nn.Module):
    """A layer with a weight (N, K) quantised to 8 or 4 bits."""

    weight: Tensor
    scales: Tensor
    places: Tensor | None

    def __init__(self, weight: Tensor, scales: Tensor, rows: int, places: Tensor | None = None) -> None:
        super().__init__()
        sixteens = -(-rows // LANES)
        fits = weight.dim() == 3 and len(weight) == sixteens and weight.shape[2] in (16 * LANES, 32 * LANES)
        if not fits or scales.shape != (*weight.shape[:2], LANES):
            raise ConfigError(
                f"{tuple(weight.shape)} codes and {tuple(scales.shape)} scales do not form a weight of {rows} rows"
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

    @property
    def stands_for(self) -> int:
        """Number of parameters of the layer that this quantised layer replaces."""
        bias = getattr(self, "bias", None)
        return self.rows * self.columns + (0 if bias is None else bias.numel())

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantised weight (N, K)."""
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
    """`nn.Embedding` with a quantised weight, for inference; also the output layer of models with tied weights.

    Args:
        factor: number that the rows are multiplied by, as in Gemma.
    """

    like: Tensor

    def __init__(
        self, weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> None:
        super().__init__(weight, scales, rows)
        self.factor = factor
        # This empty tensor holds the data type of the output; because it is a buffer, casts of the model convert it.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1)
        sixteen, lane = flat // LANES, flat % LANES
        numbers = self.weight.view(*self.weight.shape[:2], -1, LANES, 4)[sixteen, :, :, lane].flatten(2)
        if self.bits == 4:
            numbers = torch.cat((numbers & 15, numbers >> 4), -1)
        of_rows = self.scales.view(torch.float16)[sixteen, :, lane]
        values = (numbers.to(wide(self.like.dtype)) - ZERO[self.bits]) * of_rows[..., None]
        rows = values.to(self.like.dtype).view(*tokens.shape, self.columns)
        return rows if self.factor == 1 else rows * self.factor

    def logits(self, x: Tensor) -> Tensor:
        """Use the embedding's weight as the output layer: hidden states (…, K) to logits (…, N)."""
        return quantized_linear(x, self.weight, self.scales, self.rows)


class QuantizedExperts(Quantized):
    """The weights (E, N, K) of E experts, quantised to 8 or 4 bits; an expert's matrix is dequantised when it is read.

    Args:
        rows: E · N, the rows of all experts together. count: E, the number of experts.
    """

    like: Tensor

    def __init__(self, weight: Tensor, scales: Tensor, rows: int, count: int, dtype: torch.dtype) -> None:
        super().__init__(weight, scales, rows)
        self.count = count
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        rows = self.rows // self.count
        own = slice(int(expert) * rows // LANES, (int(expert) + 1) * rows // LANES)
        return dense(self.weight[own], self.scales[own], rows, self.like.dtype)


# -- models ------------------------------------------------------------------------------------------------------------


def matrix(module: nn.Module) -> Tensor | None:
    """The weight (N, K) of a linear layer, a packed linear layer, GPT-2's `Conv1D` or an embedding; None for other
    modules."""
    if isinstance(module, PackedLinear):
        return packed24.unpack(module.values, module.indices)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    if is_transposed(module):
        return weight.T
    return weight if isinstance(module, nn.Linear | nn.Embedding) else None


def _numbers_of(weight: Tensor, bits: Bits, *, rounded: bool) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of a weight; if not `rounded`, they are uninitialised, for `load_state_dict` to fill.

    Raises:
        ConfigError: the weight cannot be quantised.
    """
    if rounded:
        return pack(*quantize(weight, bits), bits)
    shape = (-(-weight.shape[0] // LANES), weight.shape[1] // GROUP, LANES)
    numbers = torch.empty(*shape[:2], GROUP * LANES * bits // 8, dtype=torch.uint8, device=weight.device)
    return numbers, torch.empty(shape, dtype=torch.int16, device=weight.device)


def of(module: nn.Module, bits: Bits, *, rounded: bool = True) -> Quantized:
    """Make a quantised layer to replace `module`; if not `rounded`, its weight is uninitialised."""
    weight = _numbered(module)
    assert weight is not None
    return _layer(module, *_numbers_of(weight, bits, rounded=rounded), weight)


def _stays24(module: nn.Module) -> TypeGuard[PackedLinear]:
    """Whether a layer stays 2:4 when it is quantised, which takes fewer bytes; its values must fill whole groups."""
    return isinstance(module, PackedLinear) and module.values.shape[1] % GROUP == 0


def _numbered(module: nn.Module) -> Tensor | None:
    """The tensor that is quantised in a layer: its weight, or the packed values if the layer stays 2:4; None for other
    modules."""
    return module.values if _stays24(module) else matrix(module)


def _layer(module: nn.Module, numbers: Tensor, scales: Tensor, weight: Tensor) -> Quantized:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(numbers, scales, weight.shape[0], weight.dtype, scale_of(module) or 1.0)
    bias, places = getattr(module, "bias", None), pack_places(module.indices) if _stays24(module) else None
    return QuantizedLinear(numbers, scales, weight.shape[0], None if bias is None else bias.detach(), places)


def choose(model: nn.Module, bits: Bits) -> tuple[dict[str, Bits], dict[str, str]]:
    """Choose the layers to quantise: linear layers in blocks, and experts, to `bits` bits; all other linear layers and
    embeddings to 8 bits.

    Returns:
        Two mappings by layer name: the bits of the layers to quantise, and the reason why any other layer is not
        quantised.
    """
    inside = {module for block in repeated(model) for module in block.modules()}
    readers = read_by_others(model) | dict.fromkeys(routers(model), "it chooses experts")
    chosen: dict[str, Bits] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if (weight := matrix(module)) is not None:
            if reason := readers.get(module) or _why_not(model, module) or unfit(weight):
                left[name] = reason
            else:
                chosen[name] = bits if module in inside else 8
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                if not _is_read_by_index(type(module), own):
                    reason = "its matrices are not read one by one"
                elif parameter.shape[1] % LANES:
                    reason = f"its number of rows is not a multiple of {LANES}"
                else:
                    reason = unfit(parameter.flatten(0, 1))
                if reason:
                    left[f"{name}.{own}"] = reason
                else:
                    chosen[f"{name}.{own}"] = bits
    return chosen, left


def _why_not(model: nn.Module, module: nn.Module) -> str | None:
    """The reason why a layer cannot be replaced by a quantised linear layer or embedding; None if it can."""
    if isinstance(module, nn.Linear):
        return None if is_product(module) else f"{type(module).__name__} has a forward pass of its own"
    if isinstance(module, nn.Embedding):
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", module.num_embeddings)
        if module.num_embeddings != vocabulary:
            return "it embeds positions, not tokens"
        return f"{type(module).__name__} does more than look up rows" if scale_of(module) is None else None
    return None


@cache
def _is_read_by_index(kind: type[nn.Module], name: str) -> bool:
    """Whether the methods of a class use an attribute only by indexing it, as `self.name[…]`."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    methods = re.split(r"^    def (?=\w)", source, flags=re.MULTILINE)[1:]
    use = re.compile(rf"self\.{re.escape(name)}\b(\[)?")
    are_indexed = [bracket for text in methods if not text.startswith("__init__") for bracket in use.findall(text)]
    return bool(are_indexed) and all(are_indexed)


def replace(model: nn.Module, bits: Mapping[str, Bits], *, rounded: bool = False) -> None:
    """Replace layers by quantised ones; layers that share a weight still share it afterwards.

    Args:
        bits: names of the layers, with their bits.
        rounded: whether the weights are quantised; by default they are uninitialised, for `load_state_dict` to fill.
    """
    made: dict[int, Quantized] = {}
    for name, width in bits.items():
        path, _, own = name.rpartition(".")
        parent = model.get_submodule(path)
        experts = parent._parameters.get(own)
        if experts is not None and experts.dim() == 3:
            numbers = _numbers_of(experts.detach().flatten(0, 1), width, rounded=rounded)
            rows, count = experts.shape[0] * experts.shape[1], experts.shape[0]
            delattr(parent, own)
            parent.add_module(own, QuantizedExperts(*numbers, rows, count, experts.dtype))
            if callable(choose_products := getattr(model, "set_experts_implementation", None)):
                choose_products("eager")  # other implementations read all experts at once
            continue
        module = model.get_submodule(name)
        weight = _numbered(module)
        if weight is None:
            raise ConfigError(f"`{name}` is a {type(module).__name__}, neither a linear layer nor an embedding")
        key = id(getattr(module, "weight", module))
        if (tied := made.get(key)) is not None:
            layer = _layer(module, tied.weight, tied.scales, weight)
        else:
            layer = made[key] = of(module, width, rounded=rounded)
        slorb.carry_over(module, layer)
        model.set_submodule(name, layer)


def rounded_parameters(model: nn.Module) -> int:
    """Number of parameters that quantised layers have replaced by buffers."""
    layers = {id(module.weight): module for module in model.modules() if hasattr(module, "stands_for")}
    return sum(int(module.stands_for) for module in layers.values())  # pyrefly: ignore[bad-argument-type]


def quantized(model: nn.Module) -> dict[str, Bits]:
    """The names of the quantised layers, with their bits."""
    return {name: module.bits for name, module in model.named_modules() if isinstance(module, Quantized)}


def packed(model: nn.Module) -> list[str]:
    """The names of the layers that are both quantised and 2:4."""
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, Quantized) and module.places is not None]
