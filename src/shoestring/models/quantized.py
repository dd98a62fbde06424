"""Layers whose weights have 8 or 4 bits, for decoding: rounded to nearest, with a scale for every 32 inputs of a row.

The numbers are those of llama.cpp's Q8_0 and Q4_0: w = scale · q, q from -127 to 127 or from -8 to 7, the scale in
fp16, together 8.5 and 4.5 bits a weight. So its files can be taken over as they are. In memory they have the order that
the native product reads, sixteen rows side by side; see `native/skinny_quantized.c`. A zero stays a zero.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native
from shoestring.core.errors import ConfigError
from shoestring.models import slorb
from shoestring.models.blocks import is_transposed, repeated
from shoestring.models.skinny import FEW_ROWS

log = logging.getLogger("shoestring")

Bits = Literal[8, 4]

GROUP = 32
"""Inputs that share a scale."""
LANES = 16
"""Rows that lie side by side."""
_ZERO = {8: 128, 4: 8}
_CANDIDATES = torch.linspace(6.0, 9.0, 13)
_ROWS_AT_ONCE = 1 << 22  # weights that are rounded at a time, which bounds the memory that it takes
_BYTES_OF_A_GROUP = 72  # of an input, in the room that the native product works in


# -- numbers -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Round a weight to 8 or 4 bits.

    For 4 bits each group takes, of 26 scales around that which its largest weight asks for, the one with the least sum
    of squared errors, refined once by least squares: 16 levels are too few for the largest weight to decide alone.

    Args:
        weight: (N, K), finite, K a multiple of 32.

    Returns:
        Numbers (N, K / 32, 32) with the zero at 128 or 8, as bytes, and scales (N, K / 32) in fp16.

    Raises:
        ConfigError: the shape cannot be quantised, a weight is not finite, or too large for fp16.
    """
    if why := unfit(weight):
        raise ConfigError(f"a weight of shape {tuple(weight.shape)} cannot be quantised: {why}")
    if not weight.isfinite().all():
        raise ConfigError("the weight has entries that are not finite")
    groups = weight.detach().reshape(-1, GROUP)
    parts = [_rounded(part.float(), bits) for part in groups.split(max(1, _ROWS_AT_ONCE // GROUP))]
    numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if scales.isinf().any():
        raise ConfigError(f"weights of up to {float(weight.abs().max()):.3g} need scales beyond those of fp16")
    return numbers.view(len(weight), -1, GROUP), scales.view(len(weight), -1)


def _rounded(groups: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Numbers and scales of groups, (n, 32) in fp32."""
    largest = groups.abs().amax(1)
    if bits == 8:
        scales = (largest / 127).half()
        return _numbers(groups, scales, 8), scales
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for levels in (*_CANDIDATES.tolist(), *(-_CANDIDATES).tolist()):
        scales = (largest / levels).half().float()
        q = (groups * _inverse(scales)[:, None]).round_().clamp_(-8, 7)
        refined = ((groups * q).sum(1) / q.square().sum(1).clamp_min(1)).half().float()
        for each in (scales, refined):
            q = (groups * _inverse(each)[:, None]).round_().clamp_(-8, 7)
            error = (q * each[:, None] - groups).square_().sum(1)
            better = error < least
            best, least = torch.where(better, each, best), torch.where(better, error, least)
    scales = best.half()
    return _numbers(groups, scales, 4), scales


def _numbers(groups: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    least = -127 if bits == 8 else -8
    q = (groups * _inverse(scales.float())[:, None]).round_().clamp_(least, 127 if bits == 8 else 7)
    return (q + _ZERO[bits]).byte()


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 where the scale is 0, that of a group of zeros."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def unfit(weight: Tensor) -> str | None:
    """Why a weight cannot be quantised; None where it can."""
    if weight.dim() != 2 or not weight.is_floating_point():
        return "it is no matrix of floating-point numbers"
    if weight.shape[1] % GROUP or not weight.numel():
        return f"its inputs are no multiple of {GROUP}"
    return None


# -- memory ------------------------------------------------------------------------------------------------------------


def pack(numbers: Tensor, scales: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """The order of the native product.

    Args:
        numbers, scales: as `quantize` returns them, N rows and G groups.

    Returns:
        Bytes (N / 16, G, 512 or 256), N rounded up, and the bits of scales (N / 16, G, 16), int16, which no cast of a
        model to another type changes.
    """
    rows = -(-len(numbers) // LANES) * LANES
    padded = numbers.new_full((rows, *numbers.shape[1:]), _ZERO[bits])
    padded[: len(numbers)] = numbers
    of_rows = scales.new_zeros(rows, scales.shape[1])
    of_rows[: len(scales)] = scales
    if bits == 4:
        padded = padded[..., :16] | padded[..., 16:] << 4
    chunks = padded.view(rows // LANES, LANES, padded.shape[1], -1, 4).permute(0, 2, 3, 1, 4)
    of_rows = of_rows.half().view(rows // LANES, LANES, -1).transpose(1, 2)
    return chunks.flatten(2).contiguous(), of_rows.contiguous().view(torch.int16)


def unpack(weight: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Numbers (rows, G, 32) and scales (rows, G) of what `pack` returned."""
    sixteens, groups, size = weight.shape
    numbers = weight.view(sixteens, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4).reshape(sixteens * LANES, groups, -1)
    if size == 16 * LANES:
        numbers = torch.cat((numbers & 15, numbers >> 4), -1)
    of_rows = scales.view(torch.float16).transpose(1, 2).reshape(sixteens * LANES, groups)
    return numbers[:rows], of_rows[:rows]


def dequantize(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The weight (rows, K) that packed numbers stand for."""
    numbers, of_rows = unpack(weight, scales, rows)
    values = (numbers.to(_wide(dtype)) - _ZERO[_bits(weight)]).mul_(of_rows[..., None])
    return values.flatten(1).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _bits(weight: Tensor) -> Bits:
    return 8 if weight.shape[2] == GROUP * LANES else 4


# -- products ----------------------------------------------------------------------------------------------------------


def quantized_linear(x: Tensor, weight: Tensor, scales: Tensor, rows: int, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + bias.

    On a CPU an input of few rows is multiplied by the packed weight in one pass over it, natively: its entries become
    integers of 16 bits, with a scale for each group. All else multiplies by the weight as `dequantize` returns it.

    Args:
        x: (…, K), of any floating type. weight, scales: as `pack` returns them. rows: N. bias: (N,).

    Returns:
        (…, N), of the type of x.
    """
    if torch.compiler.is_compiling():
        y = _operator(x, weight, scales, rows)
    else:
        y = _product(x, weight, scales, rows)
    return y if bias is None else y + bias


def _product(x: Tensor, weight: Tensor, scales: Tensor, rows: int) -> Tensor:
    inputs = weight.shape[1] * GROUP
    if x.shape[-1] != inputs:
        raise RuntimeError(f"an input of {x.shape[-1]} features for a layer of {inputs}")
    few = 0 < x.numel() <= FEW_ROWS * inputs
    if few and x.device.type == "cpu" and x.dtype is not torch.float64 and (kernel := _kernel()) is not None:
        return _native(kernel, x, weight, scales, rows)
    return F.linear(x, dequantize(weight, scales, rows, x.dtype))


def _native(kernel: Any, x: Tensor, weight: Tensor, scales: Tensor, rows: int) -> Tensor:
    inputs = x.shape[-1]
    count = x.numel() // inputs
    flat = x.detach().float().contiguous()
    y = flat.new_empty((*x.shape[:-1], rows))
    room = weight.new_empty(count * weight.shape[1] * _BYTES_OF_A_GROUP)
    kernel(
        _bits(weight),
        count,
        rows,
        inputs,
        weight.data_ptr(),
        scales.data_ptr(),
        flat.data_ptr(),
        room.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y.to(x.dtype)


@cache
def _kernel() -> Any:
    """The C function; None on a machine that cannot compile it."""
    try:
        function = native.load("skinny_quantized").skinny_quantized
    except native.CompileError as error:
        log.warning("quantised layers are dequantised for every product, which is slower than dense ones: %s", error)
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, size, size, size, *[pointer] * 5, ctypes.c_int]
    function.restype = None
    return function


@torch.library.custom_op("shoestring::quantized_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, scales: Tensor, rows: int) -> Tensor:
    return _product(x, weight, scales, rows)


@_operator.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


# -- layers ------------------------------------------------------------------------------------------------------------


class _Quantized(nn.Module):
    """A weight (N, K) of 8 or 4 bits."""

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor, rows: int) -> None:
        super().__init__()
        sixteens = -(-rows // LANES)
        fits = weight.dim() == 3 and len(weight) == sixteens and weight.shape[2] in (16 * LANES, 32 * LANES)
        if not fits or scales.shape != (*weight.shape[:2], LANES):
            raise ConfigError(
                f"{tuple(weight.shape)} numbers and {tuple(scales.shape)} scales are no weight of {rows} rows"
            )
        self.rows, self.columns = rows, weight.shape[1] * GROUP
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    @property
    def bits(self) -> Bits:
        return _bits(self.weight)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that it stands for."""
        return dequantize(self.weight, self.scales, self.rows, dtype)

    def extra_repr(self) -> str:
        return f"{self.columns}, {self.rows}, bits={self.bits}"


class QuantizedLinear(_Quantized):
    """`nn.Linear` with a quantised weight, for inference."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, scales: Tensor, rows: int, bias: Tensor | None = None) -> None:
        super().__init__(weight, scales, rows)
        self.out_features, self.in_features = rows, self.columns
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weight, self.scales, self.rows, self.bias)


class QuantizedEmbedding(_Quantized):
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
        values = (numbers.to(_wide(self.like.dtype)) - _ZERO[self.bits]) * of_rows[..., None]
        return values.to(self.like.dtype).view(*tokens.shape, self.columns)

    def logits(self, x: Tensor) -> Tensor:
        """The embedding as the head of the model: (…, K) to (…, N)."""
        return quantized_linear(x, self.weight, self.scales, self.rows)


# -- models ------------------------------------------------------------------------------------------------------------


def matrix(module: nn.Module) -> Tensor | None:
    """The weight (N, K) of a linear layer or an embedding, also of GPT-2's `Conv1D`; None of any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    if is_transposed(module):
        return weight.T
    return weight if isinstance(module, nn.Linear | nn.Embedding) else None


def empty(module: nn.Module, bits: Bits) -> _Quantized:
    """A quantised layer of the shape and type of `module`, to be loaded into."""
    weight = matrix(module)
    assert weight is not None
    rows, groups = weight.shape[0], weight.shape[1] // GROUP
    shape = (-(-rows // LANES), groups, LANES)
    numbers = torch.empty(*shape[:2], GROUP * LANES * bits // 8, dtype=torch.uint8, device=weight.device)
    return _layer(module, numbers, torch.empty(shape, dtype=torch.int16, device=weight.device), weight)


def of(module: nn.Module, bits: Bits) -> _Quantized:
    """The layer with its weight rounded.

    Raises:
        ConfigError: the weight cannot be quantised.
    """
    weight = matrix(module)
    assert weight is not None
    return _layer(module, *pack(*quantize(weight, bits), bits), weight)


def _layer(module: nn.Module, numbers: Tensor, scales: Tensor, weight: Tensor) -> _Quantized:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(numbers, scales, weight.shape[0], weight.dtype)
    bias = getattr(module, "bias", None)
    return QuantizedLinear(numbers, scales, weight.shape[0], None if bias is None else bias.detach())


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
    made: dict[int, _Quantized] = {}
    for name, width in bits.items():
        module = model.get_submodule(name)
        weight = matrix(module)
        if weight is None:
            raise ConfigError(f"`{name}` is a {type(module).__name__}, neither a linear layer nor an embedding")
        key = id(getattr(module, "weight", None))
        if (other := made.get(key)) is not None:
            layer = _layer(module, other.weight, other.scales, weight)
        else:
            layer = made[key] = of(module, width) if rounded else empty(module, width)
        slorb.carry_over(module, layer)
        model.set_submodule(name, layer)


def quantized(model: nn.Module) -> dict[str, Bits]:
    """The names of the layers that are quantised, with their bits."""
    return {name: module.bits for name, module in model.named_modules() if isinstance(module, _Quantized)}
