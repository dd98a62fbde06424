"""Products of matrices in 8 bits: e4m3 forward, e5m2 for gradients, with one scale for each tensor.

A tensor is divided by its largest magnitude over the largest number of the 8-bit type, in every step anew (dynamic
scaling; Micikevicius et al., *FP8 formats for deep learning*, 2022). It is rounded once, whatever reads it.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from shoestring.precision.casts import CAST, Casts, computed
from shoestring.precision.operators import operator_name

aten = torch.ops.aten
PRODUCTS = ("mm", "addmm")
"""Operators that can multiply 8-bit matrices."""
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-30
"""Smallest scale, so that a tensor of zeros stays zero."""
LEAST = 1024
"""Least M N / (M + N) of a product of (M, K) and (K, N). Rounding takes time in proportion to K (M + N), and 8 bits
save time in proportion to M N K. By the data sheet of an H100 both are equal at about 2,700 if each tensor is rounded
by itself for one product; but two products read a tensor, and compilers fuse rounding with what comes before."""
MULTIPLE = 16
"""Sizes must be multiples of this number, because the units of GPUs read 16 bytes at a time."""


def lacks_eight_bits(device: torch.device) -> str:
    """Why a device does not multiply 8-bit floats; empty if it does."""
    if device.type != "cuda":
        return f"this {device.type.upper()} has no units for products of 8-bit floats"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return ""
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no 8-bit floats, 8.9 has"


def unfit(node: fx.Node) -> str:
    """Why the product that a node computes cannot be in 8 bits, or would be no faster; empty if 8 bits are useful."""
    if operator_name(node) not in PRODUCTS:
        return "a product"
    *added, one, other = (source.meta["val"] for source in node.args if isinstance(source, fx.Node))
    if node.kwargs or any(tensor.ndim != 1 for tensor in added):
        return "a product that is added to a matrix"
    sizes = (*one.shape, other.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return "a product whose sizes may vary"
    rows, _, columns = sizes
    if any(size % MULTIPLE for size in sizes):
        return f"a product whose sizes are no multiples of {MULTIPLE}"
    return "a product too small for 8 bits" if rows * columns < LEAST * (rows + columns) else ""


class EightBitProducts:
    """Replaces products by products of rounded tensors.

    Args:
        gradients: the nodes that depend on the gradients of the graph's outputs, which are rounded to e5m2.
    """

    def __init__(self, casts: Casts, gradients: Container[fx.Node]) -> None:
        self.casts, self.gradients = casts, gradients
        self._rounded = dict[tuple[fx.Node, torch.dtype], tuple[fx.Node, fx.Node]]()

    def convert(self, node: fx.Node) -> None:
        """Replace a product. Its result has the 16-bit type, and its inputs are rounded from the type they have."""
        *bias, one, other = node.args
        assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
        gradients = [source in self.gradients for source in (one, other)]
        # GPUs multiply no two tensors of e5m2.
        types = [BACKWARD if gradients[0] else FORWARD, BACKWARD if gradients[1] and not gradients[0] else FORWARD]
        with self.casts.graph.inserting_before(node):
            left, left_scale = self._operand(one, types[0], by_rows=True)
            right, right_scale = self._operand(other, types[1], by_rows=False)
            added = [self._narrowed(source) for source in bias if isinstance(source, fx.Node)]
        fast = not any(gradients)  # sums of fewer bits inside of a product, which gradients do not bear
        node.target = aten._scaled_mm.default
        node.args = (left, right, left_scale, right_scale, *(added or [None]), None, self.casts.dtype, fast)
        node.kwargs = {}
        node.meta["val"] = computed(node)

    def _narrowed(self, source: fx.Node) -> fx.Node:
        return source if source.meta["val"].dtype == self.casts.dtype else self.casts.cast(source, self.casts.dtype)

    def _operand(self, source: fx.Node, dtype: torch.dtype, *, by_rows: bool) -> tuple[fx.Node, fx.Node]:
        """A rounded operand in the layout that products need, by rows or by columns, and its scale."""
        base, transposed = _untransposed(source)
        call = self.casts.call
        if (base, dtype) not in self._rounded:  # once for each tensor and type
            largest = torch.finfo(dtype).max
            wide = base if base.meta["val"].dtype == torch.float32 else self.casts.cast(base, torch.float32)
            magnitude = call(aten.amax.default, call(aten.abs.default, wide))
            scale = call(aten.clamp_min.default, call(aten.div.Tensor, magnitude, largest), SMALLEST)
            bounded = call(aten.clamp.default, call(aten.div.Tensor, wide, scale), -largest, largest)
            self._rounded[base, dtype] = call(CAST, bounded, dtype), scale
        rounded, scale = self._rounded[base, dtype]
        matrix = call(aten.t.default, rounded) if transposed else rounded
        if (matrix.meta["val"].stride(1) == 1) is by_rows:
            return matrix, scale
        if by_rows:
            return call(aten.clone.default, matrix, memory_format=torch.contiguous_format), scale
        copied = call(aten.clone.default, call(aten.t.default, matrix), memory_format=torch.contiguous_format)
        return call(aten.t.default, copied), scale


def _untransposed(source: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix that a matrix is a view of, before it was cast to fewer bits, and whether the view is transposed."""
    transposed = False
    while source.op == "call_function":
        swaps, inner = _swaps(source), source.args[0]
        follow = (swaps or source.target is CAST) and isinstance(inner, fx.Node)
        if not follow or inner.meta["val"].ndim != 2 or not inner.meta["val"].is_floating_point():
            break
        source, transposed = inner, transposed ^ swaps
    return source, transposed


def _swaps(source: fx.Node) -> bool:
    """Whether a node swaps two dimensions of its input, and does nothing else, if the input has two."""
    if source.target is aten.permute.default:
        order = source.args[1]
        return isinstance(order, list | tuple) and [int(str(dim)) % 2 for dim in order] == [1, 0]
    if source.target is aten.transpose.int:
        return {int(str(dim)) % 2 for dim in source.args[1:3]} == {0, 1}
    return source.target is aten.t.default
