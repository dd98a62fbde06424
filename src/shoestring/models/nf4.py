"""Linear layers whose frozen weights are of 4 bits as QLoRA has them (Dettmers et al., 2023), through bitsandbytes.

A weight is one of the 16 values of NormalFloat (NF4) times a scale for each 64 of them. The scales have 8 bits
themselves, with a scale in fp32 for each 256 (double quantisation): 4.13 bits a weight.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.errors import ConfigError
from shoestring.models.quantized import matrix

BLOCK, SCALES = 64, 256
"""Weights that share a scale, and scales that do."""


def library() -> ModuleType:
    """`bitsandbytes.functional`.

    Raises:
        ConfigError: it is not installed.
    """
    said = logging.getLogger("bitsandbytes")
    level = said.level
    said.setLevel(logging.ERROR)  # it warns of a kernel that it would download, and that nothing here uses
    try:
        import bitsandbytes.functional as found
    except ImportError as error:
        raise ConfigError("weights in NF4 need bitsandbytes", hint="pip install shoestring[nf4]") from error
    finally:
        said.setLevel(level)
    return found


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight (N, K) in NF4.

    Returns:
        Bytes (N K / 2,) of two weights each; bytes (N K / 64,) of scales; and the bits of the scales of those, with
        their mean as the last (N K / 64 / 256 + 1,), int32, which no cast of a model to another type changes.
    """
    given = weight.contiguous() if weight.dtype is not torch.float64 else weight.float()
    numbers, state = library().quantize_4bit(given, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    coarse = torch.cat([state.state2.absmax, state.offset.reshape(1)])
    return numbers.flatten(), state.absmax, coarse.view(torch.int32)


@torch.library.custom_op("shoestring::nf4_dequantize", mutates_args=())
def dequantize(numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The weight (rows, K) that `quantize` rounded."""
    exact = torch.float32 if dtype is torch.float64 else dtype
    values, tables = coarse.view(torch.float32), _tables(numbers.device)
    found = library()
    outer = found.QuantState(absmax=values[:-1], code=tables[1], blocksize=SCALES, dtype=torch.float32)
    columns = 2 * numbers.numel() // rows
    # Its CPU kernel counts the blocks of each row anew, which is wrong where a block goes on in the next row.
    shape = torch.Size((rows, columns) if columns % BLOCK == 0 else (1, rows * columns))
    state = found.QuantState(
        absmax=scales, shape=shape, code=tables[0], blocksize=BLOCK, quant_type="nf4", dtype=exact,
        offset=values[-1], state2=outer,
    )  # fmt: skip
    return found.dequantize_4bit(numbers[:, None], state).view(rows, columns).to(dtype)


@dequantize.register_fake
def _(numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(rows, 2 * numbers.numel() // rows, dtype=dtype)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of four bits, and those of the eight of a scale."""
    found = library()
    return found.get_4bit_type("nf4", device=device), found.create_dynamic_map().to(device)


@torch.library.custom_op("shoestring::nf4_linear", mutates_args=())
def nf4_linear(x: Tensor, numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int) -> Tensor:
    """y = x Wᵀ; the backward pass dequantises once more, so that no dense weight is held in between."""
    return F.linear(x, dequantize(numbers, scales, coarse, rows, x.dtype))


@nf4_linear.register_fake
def _(x: Tensor, numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    _, *held, ctx.rows = inputs
    ctx.save_for_backward(*held)


def _input_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient @ dequantize(*ctx.saved_tensors, ctx.rows, gradient.dtype), None, None, None, None


nf4_linear.register_autograd(_input_gradient, setup_context=_remember)


class NF4Linear(nn.Module):
    """The linear layer `module` with its weight in NF4; also GPT-2's `Conv1D`.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    weight: Tensor
    scales: Tensor
    coarse: Tensor
    bias: Tensor | None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight, bias = matrix(module), getattr(module, "bias", None)
        assert weight is not None
        self.out_features, self.in_features = weight.shape
        for name, value in zip(("weight", "scales", "coarse"), quantize(weight), strict=True):
            self.register_buffer(name, value)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        y = nf4_linear(x, self.weight, self.scales, self.coarse, self.out_features)
        return y if self.bias is None else y + self.bias

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that it stands for."""
        return dequantize(self.weight, self.scales, self.coarse, self.out_features, dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
