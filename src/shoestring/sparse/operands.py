"""Packed sparse weights, computed once per optimizer step and shared by all matrix products of the step.

A step multiplies by each weight at least twice, forward and backward, and again for every further micro-batch and for
recomputed activations. A weight does not change during a step. The weight is therefore pruned, rounded to 16 bits and
packed when it is first needed, and the packed form is dropped before the optimizer changes the weight.

Memory traffic per step and fp32 weight, if both directions are sparse: 6.1 bytes to prune (4 bytes and one mask bit are
read, 2 bytes written), and 4.3 bytes to pack W and Wᵀ by torch's tile kernel (2 read, 2 · 9/8 written). If cuSPARSELt
packs instead, W and Wᵀ are written in one pass, pruning moves 8.1 bytes, and packing 6.3 bytes. Without the cache,
every product would prune and pack again, at 6.1 + 3.1 bytes, and the backward product would also transpose, at 4 bytes.

Memory held from the first product to the optimizer's step: 9/8 bytes per weight for each packed direction, and 2 bytes
for each dense direction. Dense layers hold 2 bytes per weight, for autocast's copy.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shoestring._torch import cslt_compress
from shoestring.sparse.semi_structured import (
    ProductChoice,
    capturing,
    multiplied,
    packed_both,
    readable,
    tiles_fit,
)


class Pruning(Protocol):
    """Computes the sparse weight of one layer from the dense weight."""

    def __call__(
        self, weight: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the sparse weight (rows, columns), if `straight`, and its transpose, if `transposed`.

        Both results are contiguous and in `dtype`; a result that was not requested is None.
        """
        ...


class SparseOperand:
    """Cache of the packed forms of one layer's sparse weight.

    Args:
        both: whether the weight is 2:4 along columns too, so that the weight and its transpose can be packed.
        remembered: whether packed forms may be cached; False if FSDP gathers and frees the weight.
    """

    def __init__(self, prune: Pruning, *, both: bool, remembered: bool = True) -> None:
        self.prune, self.both, self.remembered = prune, both, remembered
        self.needs_dense = False  # whether some product runs dense, and needs the pruned weight unpacked
        self.number = next(_numbers)
        self._key: tuple[Any, ...] = ()
        self._forms: WeightForms | None = None
        self._imagined: Tensor | None = None
        operands[self.number] = self

    def forms(self, weight: Tensor, dtype: torch.dtype) -> WeightForms:
        """Return the cached forms if the weight has not changed, else new forms.

        Forms are never cached inside a CUDA graph: every replay must compute them again.
        """
        if not self.remembered or weight.is_inference() or capturing():
            return WeightForms(self, weight, dtype, both=False)
        key = (weight.data_ptr(), weight._version, weight.dtype, dtype)
        if self._forms is None or key != self._key:
            self._key, self._forms = key, WeightForms(self, weight, dtype, both=self.both)
        return self._forms

    def imagine(self, weight: Tensor, dtype: torch.dtype) -> None:
        """For a fake weight, allocate as many bytes as the forms would take, so that memory is predicted correctly."""
        entries = 2 * _PACKED if self.both else _PACKED + 1  # without 2:4 columns the backward product is dense
        if self._imagined is None:
            self._imagined = weight.new_empty(round(weight.numel() * entries), dtype=dtype)

    def forget(self) -> None:
        """Drop the cached forms, because the weight or its mask is about to change."""
        self._key, self._forms, self._imagined = (), None, None


operands: WeakValueDictionary[int, SparseOperand] = WeakValueDictionary()
"""All operands by number, because a custom operator can take a number but no object."""
_numbers = count()
_PACKED = 9 / 16  # size relative to the weight: half of the entries, and two bits per kept entry


class WeightForms:
    """The dense and packed forms of one weight at its current values; each form is computed when it is first needed.

    Args:
        both: whether to pack both the weight and its transpose as soon as one of them is needed.
    """

    def __init__(self, operand: SparseOperand, weight: Tensor, dtype: torch.dtype, *, both: bool) -> None:
        self.operand, self.weight, self.dtype, self.both = operand, weight.detach(), dtype, both
        self._dense: Tensor | None = None
        self._packed: dict[bool, Tensor] = {}

    def dense(self) -> Tensor:
        """The pruned weight, unpacked; (rows, columns)."""
        self._dense = self._straight()
        return self._dense

    def packed(self, *, transposed: bool) -> Tensor:
        """The pruned weight, or its transpose, packed for cuSPARSELt."""
        if transposed not in self._packed:
            packed = self.pack(transposed=transposed)
            self._packed |= dict(zip((transposed, not transposed), packed, strict=False))
        return self._packed[transposed]

    def pack(self, *, transposed: bool) -> list[Tensor]:
        """Pack the pruned weight or its transpose without using the cache. With `both`, the other packed matrix follows
        in the list."""
        if not self.both:
            return [cslt_compress(self._pruned(transposed=True) if transposed else self._straight())]
        shape, device = self.weight.shape, self.weight.device
        if tiles_fit(shape, self.dtype, device, self._straight):
            packed = packed_both(self._straight())
            return [packed[transposed], packed[not transposed]]
        straight, transpose = self.operand.prune(self.weight, self.dtype, straight=True, transposed=True)
        assert straight is not None and transpose is not None
        if self.operand.needs_dense:
            self._dense = straight
        return [cslt_compress(matrix) for matrix in ((transpose, straight) if transposed else (straight, transpose))]

    def _straight(self) -> Tensor:
        """The pruned weight, unpacked; cached if a dense product needs it too."""
        if self._dense is not None:
            return self._dense
        straight = self._pruned(transposed=False)
        if self.operand.needs_dense:
            self._dense = straight
        return straight

    def _pruned(self, *, transposed: bool) -> Tensor:
        pair = self.operand.prune(self.weight, self.dtype, straight=not transposed, transposed=transposed)
        pruned = pair[transposed]
        assert pruned is not None
        return pruned


@torch.library.custom_op("shoestring::times_weight_24", mutates_args=())
def times_weight(dense: Tensor, weight: Tensor, operand: int, transposed: bool, by_columns: bool) -> Tensor:
    """Multiply by a layer's sparse weight: by Wᵀ in the forward pass, by W for input gradients (`transposed`).

    Args:
        dense: (tokens, columns), or (tokens, rows) with `transposed`, in 16 bits.
        weight: the trained dense weight; (rows, columns).
        operand: number of the weight's `SparseOperand`.
        by_columns: whether the result is column-major.

    Returns:
        (tokens, rows), or (tokens, columns) with `transposed`.
    """
    sparse, dense = operands[operand], readable(dense)
    forms = sparse.forms(weight, dense.dtype)

    def dense_product() -> Tensor:
        matrix = forms.dense().t() if transposed else forms.dense()
        return (matrix @ dense.t()).t() if by_columns else dense @ matrix.t()

    trial = None
    if sparse.both or not transposed:
        shape = (weight.shape[1], weight.shape[0]) if transposed else (weight.shape[0], weight.shape[1])
        pack = partial(forms.pack, transposed=transposed)
        trial = ProductChoice(shape, dense, pack, dense_product, by_columns).trial()
    if trial is None or not trial.faster:
        sparse.needs_dense = True
        return dense_product()
    return multiplied(forms.packed(transposed=transposed), dense, trial.algorithm, by_columns=by_columns)


@times_weight.register_fake
def _(dense: Tensor, weight: Tensor, operand: int, transposed: bool, by_columns: bool) -> Tensor:
    rows, columns = dense.shape[0], weight.shape[1 if transposed else 0]
    return dense.new_empty(columns, rows).t() if by_columns else dense.new_empty(rows, columns)
