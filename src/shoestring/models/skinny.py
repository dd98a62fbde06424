"""Native kernels for matrix products and attention with few tokens on a CPU, as in decoding.

These operations are bandwidth-bound, and torch's own product reached only a third of the memory bandwidth on the
processor that was measured. The native kernels read a weight or a cache from memory only once. The result for a
token is bitwise independent of the other tokens in the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native

OTHERWISE = "decoding takes torch's functions, which are slower than native ones"

FEW_ROWS = 16
"""Maximum number of input rows for which native products are used on any processor."""
DENSE_ROWS = {torch.float32: 64, torch.bfloat16: 32}
"""Maximum number of input rows for which native products are used on processors with AVX-512, by data type. In
measurements up to this number of rows, torch's product was at most 8% faster than the native one; for 17 to 32 rows of
float32, torch's took 1.3 to 2.1 times as long (four shapes of 0.7 to 17 M weights, two threads)."""
FEWEST_WEIGHTS = 1 << 17
"""Minimum number of weights for which native products are used; for smaller layers, the call costs more than the
product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `F.linear`, but computed by a native kernel if x has few rows (`most_rows`) and no gradient is required.

    Args:
        x: (…, K). weight: (N, K), not copied. bias: (N,).

    Returns:
        (…, N), of the type of x. Sums are in fp32.
    """
    product = kernel() if fits(x, weight) else None
    if product is None:
        return F.linear(x, weight, bias)
    x, (outputs, inputs) = x.contiguous(), weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    product(
        int(x.dtype is torch.bfloat16),
        x.numel() // inputs,
        outputs,
        inputs,
        weight.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y if bias is None else y.add_(bias)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether native kernels compute the product of these tensors."""
    return (
        x.device.type == "cpu"
        and weight.device.type == "cpu"
        and x.dtype is weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and 0 < x.numel() <= most_rows(x.dtype) * x.shape[-1]
        and x.shape[-1] == weight.shape[1]
        and weight.numel() >= FEWEST_WEIGHTS
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and type(weight) in (nn.Parameter, Tensor)  # a DTensor needs its own matrix products
    )


@cache
def most_rows(dtype: torch.dtype) -> int:
    """Maximum number of input rows for which native products are used on this processor."""
    return DENSE_ROWS[dtype] if torch.backends.cpu.get_cpu_capability() == "AVX512" else FEW_ROWS


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None = None) -> Tensor | None:
    """Compute causal attention of few tokens to a cache by a native kernel; returns None if the kernel does not support
    the inputs.

    Args:
        q: (B, T, H, D). k, v: (B, K, S, D) of equal strides, not copied, H a multiple of K.
        positions: positions of the queries, int64, (B or 1, T): a query attends to the positions up to its own, which
            is at most S - 1.
        window: maximum number of positions that a query attends to, including its own; None for no limit.

    Returns:
        (B, T, H, D), of the type of q. Sums are in fp32.
    """
    B, T, H, D = q.shape
    fits = (
        not torch.compiler.is_compiling()  # torch.compile cannot trace the checks below
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype is k.dtype is v.dtype
        and 0 < T <= FEW_ROWS
        and D % 16 == 0
        and D <= 256
        and k.stride() == v.stride()
        and k.stride(3) == 1
        and torch.backends.cpu.get_cpu_capability() == "AVX512"  # without AVX-512, torch's attention is faster
        and not torch.is_grad_enabled()
        and type(q) is type(k) is Tensor
    )
    attend = attention_kernel() if fits else None
    if attend is None:
        return None
    q, positions = q.contiguous(), positions.contiguous()
    y = torch.empty_like(q)
    attend(
        int(q.dtype is torch.bfloat16),
        *(B, H, k.shape[1], T, D, window or 0),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        *k.stride()[:3],
        positions.data_ptr(),
        T if len(positions) > 1 else 0,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


@cache
def kernel() -> Any:
    """The C function for matrix products, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    return native.function("skinny_dense", [ctypes.c_int, *[size] * 3, *[pointer] * 3, ctypes.c_int], OTHERWISE)


@cache
def attention_kernel() -> Any:
    """The C function for attention, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, *[size] * 6, *[pointer] * 3, *[size] * 3, pointer, size, pointer, ctypes.c_int]
    return native.function("skinny_attention", types, OTHERWISE)


class Products:
    """Context in which the linear layers of a model, and an embedding that is also its output layer, use `linear`.

    No weights are copied. Layers whose class or instance overrides the forward pass are left unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._methods = [
            (vars(module), "logits" if isinstance(module, nn.Embedding) else "forward", product)
            for module in model.modules()
            if (product := product_of(module)) is not None
        ]
        self._set: list[tuple[dict[str, Any], str]] = []

    def __enter__(self) -> None:
        # This runs for every token; writing to the `__dict__` of a hundred modules takes only microseconds.
        for names, name, method in self._methods:
            if name not in names:
                names[name] = method
                self._set.append((names, name))

    def __exit__(self, *_: object) -> None:
        while self._set:
            names, name = self._set.pop()
            del names[name]


def product_of(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A function that computes x Wᵀ by `linear`, for a linear layer or an embedding that is also an output layer; None
    for layers that are too small or whose class overrides the forward pass."""
    output = isinstance(layer, nn.Embedding) and hasattr(layer, "logits")
    if not output and not (isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward):
        return None
    weight: Any = layer.weight
    return partial(_product, layer) if weight.numel() >= FEWEST_WEIGHTS else None


def is_product(forward: object) -> bool:
    """Whether a forward pass is a result of `product_of`."""
    return isinstance(forward, partial) and forward.func is _product


def _product(layer: Any, x: Tensor) -> Tensor:
    return linear(x, layer.weight, getattr(layer, "bias", None))
