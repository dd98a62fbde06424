"""Linear layers with packed 2:4 weights: for each four neighbouring inputs, only two weights and their places are
stored.

A packed weight takes 17/32 of the dense weight's bytes in fp32 and 9/16 in bf16. The time of a bandwidth-bound product
(decoding one token at a time) falls by the same factor. Packing is lossless: `unpack` returns the same bits, except
that the zeros that are not stored lose their sign.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native
from shoestring.core.errors import ConfigError
from shoestring.models import slorb
from shoestring.models.plain_layers import is_product, read_directly

GROUP = 8
"""The number of inputs must be a multiple of this: the four places of two groups of four inputs fill one byte."""

FEW_ROWS = 8
"""Maximum number of input rows for which the packed product is used; for more rows, the weight is unpacked first."""


def is_24(weight: Tensor) -> bool:
    """Whether at most two of each four neighbouring entries of a row are nonzero, and the shape can be packed."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        return False
    return bool(((weight.detach() != 0).view(-1, 4).sum(1) <= 2).all())


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a 2:4 weight.

    Args:
        weight: (N, K), K a multiple of eight, of any floating type.

    Returns:
        Values (N, K / 2) of the same type, and their places (N, K / 8) as bytes. Byte ⌊v / 4⌋ holds the place of value
        v within its group, in the two bits that start at bit 2 (v mod 4). The two values of a group are stored in order
        of their places.

    Raises:
        ConfigError: the shape cannot be packed, or more than two of four entries are nonzero; no nonzero entry is ever
            dropped.
    """
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ConfigError(
            f"a weight of shape {tuple(weight.shape)} cannot be packed: its number of inputs is not a multiple of 8"
        )
    groups = weight.detach().reshape(-1, 4)
    nonzero = groups != 0
    count = nonzero.sum(1)
    if wrong := int((count > 2).sum()):
        raise ConfigError(
            f"the weight is not 2:4: {wrong} of {len(groups)} groups of four have more than two values",
            hint="prune it before packing",
        )
    # Order each group: nonzero entries first, then negative zeros, then positive zeros; ties are in order of place.
    kinds = nonzero.logical_not().byte() * 4 + (groups.signbit() | nonzero).logical_not().byte() * 4
    order = (kinds + torch.arange(4, device=weight.device, dtype=torch.uint8)).sort(1).indices
    places = order[:, :2].sort(1).values
    values = groups.gather(1, places).view(weight.shape[0], -1)
    shifts = torch.tensor([0, 2, 4, 6], device=weight.device, dtype=torch.uint8)
    indices = (places.byte().view(-1, 4) << shifts).sum(1, dtype=torch.uint8).view(weight.shape[0], -1)
    return values, indices


def unpack(values: Tensor, indices: Tensor) -> Tensor:
    """The weight (N, K) from `values` (N, K / 2) and their places (N, K / 8)."""
    shifts = torch.tensor([0, 2, 4, 6], device=values.device, dtype=torch.uint8)
    places = (indices.view(-1, 1) >> shifts & 3).view(-1, 2).long()
    groups = values.new_zeros(len(places), 4).scatter_(1, places, values.reshape(-1, 2))
    return groups.view(values.shape[0], -1)


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed 2:4 weight, for inference.

    On a CPU, a native kernel multiplies inputs of few rows by the packed weight, which it reads only once; otherwise
    the weight is unpacked and `F.linear` is called. Sums are in fp32.
    """

    values: Tensor
    indices: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, indices: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        rows, half = values.shape
        if indices.shape != (rows, half // 4) or indices.dtype != torch.uint8:
            raise ConfigError(f"places of shape {tuple(indices.shape)} do not fit values of {tuple(values.shape)}")
        self.out_features, self.in_features = rows, half * 2
        self.register_buffer("values", values.contiguous())
        self.register_buffer("indices", indices.contiguous())
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> PackedLinear:
        """The layer with its weight packed; ConfigError if the weight is not 2:4."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(*pack(linear.weight), bias)

    @classmethod
    def like(cls, linear: nn.Linear) -> PackedLinear:
        """An uninitialised layer of the shape and type of `linear`, for `load_state_dict` to fill."""
        weight = linear.weight
        values = weight.new_empty(weight.shape[0], weight.shape[1] // 2, requires_grad=False)
        indices = torch.empty(weight.shape[0], weight.shape[1] // GROUP, dtype=torch.uint8, device=weight.device)
        return cls(values.detach(), indices, None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.values, self.indices, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, 2:4"


def packed_linear(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x Wᵀ + bias for a packed weight W.

    Args:
        x: (…, K), of the type of `values`.
        values, indices: as `pack` returns them.
        bias: (N,).

    Returns:
        (…, N), of the type of x.
    """
    if torch.compiler.is_compiling():
        y = _operator(x, values, indices)
    else:
        y = _product(x, values, indices)
    return y if bias is None else y + bias


def _product(x: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    few = x.numel() <= FEW_ROWS * x.shape[-1]
    if few and x.device.type == "cpu" and values.dtype in (torch.float32, torch.bfloat16) and x.numel():
        kernel = _kernel()
        if kernel is not None:
            return _native(kernel, x, values, indices)
    return F.linear(x, unpack(values, indices).to(x.dtype))


def _native(kernel: Any, x: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    outputs, inputs = values.shape[0], values.shape[1] * 2
    if x.shape[-1] != inputs:
        raise RuntimeError(f"an input of {x.shape[-1]} features for a layer of {inputs}")
    flat = x.detach().to(torch.float32).reshape(-1, inputs).contiguous()
    y, room = flat.new_empty(len(flat), outputs), torch.empty_like(flat)
    kernel(
        int(values.dtype is torch.bfloat16),
        len(flat),
        outputs,
        inputs,
        values.data_ptr(),
        indices.data_ptr(),
        flat.data_ptr(),
        room.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y.view(*x.shape[:-1], outputs).to(x.dtype)


@cache
def _kernel() -> Any:
    """The C function for products with packed weights, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, size, size, size, *[pointer] * 5, ctypes.c_int]
    return native.function(
        "packed24", types, "packed layers are unpacked for every product, which is slower than dense ones"
    )


@torch.library.custom_op("shoestring::packed24_linear", mutates_args=())
def _operator(x: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    return _product(x, values, indices)


@_operator.register_fake
def _(x: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])


def replace(model: nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers `names` by uninitialised packed layers, for `load_state_dict` to fill."""
    for name in names:
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise ConfigError(f"`{name}` is a {type(linear).__name__}, not a linear layer")
        packed = PackedLinear.like(linear)
        slorb.carry_over(linear, packed)
        model.set_submodule(name, packed)


def packed(model: nn.Module) -> list[str]:
    """The names of the packed layers."""
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def pack_layers(model: nn.Module) -> list[str]:
    """Convert every linear layer whose weight is 2:4 and not shared to a packed layer; returns the names of these
    layers."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    readings = read_directly(model)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and owners[id(module.weight)] == 1
        and is_24(module.weight)
        and is_product(module)
        and module not in readings
    ]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        packed = PackedLinear.from_linear(linear)
        slorb.carry_over(linear, packed)
        model.set_submodule(name, packed)
    return names
