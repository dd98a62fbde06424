"""Products of few rows with dense weights on a CPU, natively: what a decoder computes, one or a few tokens at a time.

They are bound by the memory's bandwidth, of which torch's own product reaches a third on the processors measured here
(`benchmarks/decode/weights.py`); the native one reads a weight once for up to 16 rows. A row of the result is the same
bit by bit alone and beside others.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import native
from shoestring.models.gpt import Embedding

log = logging.getLogger("shoestring")

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
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    rows, (outputs, inputs) = len(flat), weight.shape
    y = flat.new_empty(rows, outputs)
    pointers = (weight.data_ptr(), flat.data_ptr(), y.data_ptr())
    kernel(int(x.dtype is torch.bfloat16), rows, outputs, inputs, *pointers, torch.get_num_threads())
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], outputs)


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
        and type(weight) in (nn.Parameter, Tensor)  # a sharded one has its own products
    )


@cache
def _kernel() -> Any:
    """The C function; None on a machine that cannot compile it."""
    try:
        function = native.load("skinny_dense").skinny_dense
    except native.CompileError as error:
        log.warning("decoding takes torch's products, which are slower than native ones: %s", error)
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, size, size, size, *[pointer] * 3, ctypes.c_int]
    function.restype = None
    return function


class Products:
    """Within this context the linear layers of a model, and its embedding where that is the head too, take `linear`.

    Nothing is copied, and layers whose forward pass is their own, or another's, keep it.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [
            (module, "logits" if isinstance(module, Embedding) else "forward")
            for module in model.modules()
            if isinstance(module, Embedding)
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
