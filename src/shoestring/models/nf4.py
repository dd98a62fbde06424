"""Linear layers with frozen 4-bit weights as in QLoRA (Dettmers et al., 2023), through bitsandbytes.

A weight is one of the 16 values of NormalFloat (NF4) times a scale shared by 64 weights. The scales are in turn
quantised to 8 bits, with one fp32 scale for each 256 of them (double quantisation). The total is 4.13 bits a weight.
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
"""Number of weights that share a scale, and number of scales that share a second-level scale."""


def library() -> ModuleType:
    """`bitsandbytes.functional`.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # bitsandbytes warns of a kernel to download, which is not needed here
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ConfigError("weights in NF4 need bitsandbytes", hint="pip install shoestring[nf4]") from error
    finally:
        logger.setLevel(level)
    return functional


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight (N, K) to NF4.

    Returns:
        The codes, two in each byte (N K / 2,); the 8-bit scales (N K / 64,); and the second-level scales followed by
        the mean of the scales (N K / 64 / 256 + 1,). The second-level scales and the mean are stored as the bits of
        fp32 numbers in int32, so that casts of the model do not change them.
    """
    numbers, scales, coarse = _quantize(weight.detach())
    return numbers, scales, coarse


@torch.library.custom_op("shoestring::nf4_quantize", mutates_args=())
def _quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plain = weight.contiguous() if weight.dtype is not torch.float64 else weight.float()
    numbers, state = library().quantize_4bit(plain, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    coarse = torch.cat([state.state2.absmax, state.offset.reshape(1)])
    return numbers.flatten(), state.absmax, coarse.view(torch.int32)


@_quantize.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes for fake tensors; bitsandbytes itself would cache the fake tables that it creates and use them in later
    real calls."""
    scales = -(-weight.numel() // BLOCK)
    numbers = weight.new_empty(-(-weight.numel() // 2), dtype=torch.uint8)
    coarse = weight.new_empty(-(-scales // SCALES) + 1, dtype=torch.int32)
    return numbers, weight.new_empty(scales, dtype=torch.uint8), coarse


@torch.library.custom_op("shoestring::nf4_dequantize", mutates_args=())
def dequantize(numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The weight (rows, K) from the results of `quantize`."""
    exact = torch.float32 if dtype is torch.float64 else dtype
    values, tables = coarse.view(torch.float32), _tables(numbers.device)
    functional = library()
    outer = functional.QuantState(absmax=values[:-1], code=tables[1], blocksize=SCALES, dtype=torch.float32)
    columns = 2 * numbers.numel() // rows
    # The CPU kernel starts a block with each row, which is wrong if a block continues into the next row.
    shape = torch.Size((rows, columns) if columns % BLOCK == 0 else (1, rows * columns))
    state = functional.QuantState(
        absmax=scales, shape=shape, code=tables[0], blocksize=BLOCK, quant_type="nf4", dtype=exact,
        offset=values[-1], state2=outer,
    )  # fmt: skip
    return functional.dequantize_4bit(numbers[:, None], state).view(rows, columns).to(dtype)


@dequantize.register_fake
def _(numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(rows, 2 * numbers.numel() // rows, dtype=dtype)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tables: the values of the 4-bit codes of weights, and of the 8-bit codes of scales."""
    functional = library()
    return functional.get_4bit_type("nf4", device=device), functional.create_dynamic_map().to(device)


@torch.library.custom_op("shoestring::nf4_linear", mutates_args=())
def nf4_linear(x: Tensor, numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int) -> Tensor:
    """Compute y = x Wᵀ; the backward pass dequantises again, so no dense weight is kept in memory between the
    passes."""
    return F.linear(x, dequantize(numbers, scales, coarse, rows, x.dtype))


@nf4_linear.register_fake
def _(x: Tensor, numbers: Tensor, scales: Tensor, coarse: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    _, *weight, ctx.rows = inputs
    ctx.save_for_backward(*weight)


def _input_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient @ dequantize(*ctx.saved_tensors, ctx.rows, gradient.dtype), None, None, None, None


nf4_linear.register_autograd(_input_gradient, setup_context=_setup_context)


class NF4Linear(nn.Module):
    """A linear layer with its weight in NF4, made from `module`, a linear layer or a `Conv1D` of GPT-2.

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

    @property
    def stands_for(self) -> int:
        """Number of parameters of the layer that this quantised layer replaces."""
        return self.in_features * self.out_features + (0 if self.bias is None else self.bias.numel())

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantised weight (N, K)."""
        return dequantize(self.weight, self.scales, self.coarse, self.out_features, dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
