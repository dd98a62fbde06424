"""Products and attention of few tokens on a CPU, natively: what a decoder computes, one or a few tokens at a time.

They are bound by the memory's bandwidth, of which torch's own product reaches a third on the processor measured here.
The native ones read a weight, or a cache, once for up to 16 tokens. What a token gets is the same bit by bit alone and
beside others.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native

OTHERWISE = "decoding takes torch's functions, which are slower than native ones"

FEW_ROWS = 16
"""The most rows of an input for which native products are taken."""
FEWEST_WEIGHTS = 1 << 17
"""The fewest weights for which they are taken: below, the call costs more than the product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, natively where x has few rows and no gradient is asked for.

    Args:
        x: (…, K). weight: (N, K), read where it is. bias: (N,).

    Returns:
        (…, N), of the type of x. Sums are in fp32.
    """
    kernel = _kernel() if _fits(x, weight) else None
    if kernel is None:
        return F.linear(x, weight, bias)
    x, (outputs, inputs) = x.contiguous(), weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    kernel(
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


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and weight.device.type == "cpu"
        and x.dtype is weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and 0 < x.numel() <= FEW_ROWS * x.shape[-1]
        and x.shape[-1] == weight.shape[1]
        and weight.numel() >= FEWEST_WEIGHTS
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and type(weight) in (nn.Parameter, Tensor)  # a sharded one has its own products
    )


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None = None) -> Tensor | None:
    """Causal attention of few tokens to a cache, natively; None where it does not fit, and torch has to compute it.

    Args:
        q: (B, T, H, D). k, v: (B, K, S, D) with strides in common, read where they are, H a multiple of K.
        positions: of the queries, int64, (B or 1, T): each sees the positions up to its own, at most S - 1.
        window: only so many of these, its own included.

    Returns:
        (B, T, H, D), of the type of q. Sums are in fp32.
    """
    B, T, H, D = q.shape
    fits = (
        not torch.compiler.is_compiling()  # which cannot look at what follows
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype is k.dtype is v.dtype
        and 0 < T <= FEW_ROWS
        and D % 16 == 0
        and D <= 256
        and k.stride() == v.stride()
        and k.stride(3) == 1
        and torch.backends.cpu.get_cpu_capability() == "AVX512"  # on narrower vectors torch's is faster
        and not torch.is_grad_enabled()
        and type(q) is type(k) is Tensor
    )
    kernel = _attention_kernel() if fits else None
    if kernel is None:
        return None
    q, positions = q.contiguous(), positions.contiguous()
    y = torch.empty_like(q)
    kernel(
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
def _kernel() -> Any:
    """The C function of products; None on a machine that cannot compile it."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    return native.function("skinny_dense", [ctypes.c_int, *[size] * 3, *[pointer] * 3, ctypes.c_int], OTHERWISE)


@cache
def _attention_kernel() -> Any:
    """The C function of attention; None on a machine that cannot compile it."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, *[size] * 6, *[pointer] * 3, *[size] * 3, pointer, size, pointer, ctypes.c_int]
    return native.function("skinny_attention", types, OTHERWISE)


class Products:
    """Within this context the linear layers of a model, and its embedding where that is the head too, take `linear`.

    Nothing is copied, and layers whose forward pass is their own, or another's, keep it.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [
            (module, "logits" if isinstance(module, nn.Embedding) else "forward")
            for module in model.modules()
            if (isinstance(module, nn.Embedding) and hasattr(module, "logits"))
            or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
        ]
        self._methods = [(vars(module), name, partial(_product, module)) for module, name in layers]
        self._set: list[tuple[dict[str, Any], str]] = []

    def __enter__(self) -> None:
        # Straight into the modules' own names: for a hundred layers that takes microseconds, and a pass is one of many.
        for names, name, method in self._methods:
            if name not in names:
                names[name] = method
                self._set.append((names, name))

    def __exit__(self, *_: object) -> None:
        while self._set:
            names, name = self._set.pop()
            del names[name]


def _product(layer: Any, x: Tensor) -> Tensor:
    return linear(x, layer.weight, getattr(layer, "bias", None))
