"""Matrix products in 8 bits: e4m3 in the forward pass, e5m2 for gradients, with one scale per tensor.

Before rounding, a tensor is divided by a scale, its largest magnitude over the largest number of the 8-bit type, which
is recomputed in every step (dynamic scaling; Micikevicius et al., *FP8 formats for deep learning*, 2022). A tensor that
several products read is rounded once.
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
"""Minimum of M N / (M + N) for a product of (M, K) and (K, N). Rounding takes time proportional to K (M + N), and 8
bits save time proportional to M N K. By the data sheet of an H100, both are equal at about 2,700 if each tensor is
rounded separately for one product; the minimum is lower because two products read each tensor, and because compilers
fuse rounding with the preceding operators."""
MULTIPLE = 16
"""Sizes must be multiples of this number, because tensor cores read 16 bytes at a time."""


def lacks_eight_bits(device: torch.device) -> str:
    """Return the reason why a device cannot multiply 8-bit floats; empty if it can."""
    if device.type != "cuda":
        return f"this {device.type.upper()} has no units for products of 8-bit floats"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return ""
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no 8-bit floats, 8.9 has"


def unfit(node: fx.Node) -> str:
    """Return the reason why a node's product cannot be computed in 8 bits or would not be faster; empty if 8 bits
    help."""
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
    """Replaces matrix products by products of tensors rounded to 8 bits.

    Args:
        gradients: nodes that depend on the gradients of the graph's outputs; these tensors are rounded to e5m2.
    """

    def __init__(self, casts: Casts, gradients: Container[fx.Node]) -> None:
        self.casts, self.gradients = casts, gradients
        self._rounded = dict[tuple[fx.Node, torch.dtype], tuple[fx.Node, fx.Node]]()

    def convert(self, node: fx.Node) -> None:
        """Replace a product. Its result has the 16-bit type; its inputs are rounded directly from the type that they
        have."""
        *bias, one, other = node.args
        assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
        gradients = [source in self.gradients for source in (one, other)]
        # GPUs cannot multiply two e5m2 tensors.
        types = [BACKWARD if gradients[0] else FORWARD, BACKWARD if gradients[1] and not gradients[0] else FORWARD]
        with self.casts.graph.inserting_before(node):
            left, left_scale = self._operand(one, types[0], by_rows=True)
            right, right_scale = self._operand(other, types[1], by_rows=False)
            added = [self._narrowed(source) for source in bias if isinstance(source, fx.Node)]
        fast = not any(gradients)  # accumulate in fewer bits, which is too inexact for gradients
        node.target = aten._scaled_mm.default
        node.args = (left, right, left_scale, right_scale, *(added or [None]), None, self.casts.dtype, fast)
        node.kwargs = {}
        node.meta["val"] = computed(node)

    def _narrowed(self, source: fx.Node) -> fx.Node:
        return source if source.meta["val"].dtype == self.casts.dtype else self.casts.cast(source, self.casts.dtype)

    def _operand(self, source: fx.Node, dtype: torch.dtype, *, by_rows: bool) -> tuple[fx.Node, fx.Node]:
        """Return an operand rounded to 8 bits, in the layout that products need (by rows or by columns), and its
        scale."""
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
    """Look through transposes and casts of a matrix: return the matrix at their origin, and whether it is
    transposed."""
    transposed = False
    while source.op == "call_function":
        swaps, inner = _swaps(source), source.args[0]
        follow = (swaps or source.target is CAST) and isinstance(inner, fx.Node)
        if not follow or inner.meta["val"].ndim != 2 or not inner.meta["val"].is_floating_point():
            break
        source, transposed = inner, transposed ^ swaps
    return source, transposed


def _swaps(source: fx.Node) -> bool:
    """Whether a node only swaps the two dimensions of a matrix."""
    if source.target is aten.permute.default:
        order = source.args[1]
        return isinstance(order, list | tuple) and [int(str(dim)) % 2 for dim in order] == [1, 0]
    if source.target is aten.transpose.int:
        return {int(str(dim)) % 2 for dim in source.args[1:3]} == {0, 1}
    return source.target is aten.t.default
