"""Sparse weights in the forms that products take, computed once after an optimizer step and not for each product.

A step reads each weight at least twice, forward and backward, and once more for every further micro-batch and every
activation that is recomputed. What changes between are activations alone. So a weight is pruned, rounded to 16 bits
and packed when it is first needed, and forgotten before the optimizer changes it.

Bytes of memory traffic for each weight, from fp32, once a step, where both directions are sparse: 6.1 to prune (4 and
the mask's bit read, 2 written) and 4.3 to pack W and Wᵀ by torch's tile kernel (2 read, 2 · 9/8 written); 8.1 and 6.3
by cuSPARSELt's own packing, from W and Wᵀ written in one pass. For each product anew it would be 6.1 + 3.1 forward and
backward, and 4 more for the transpose, for every micro-batch.

Held from the first product to the optimizer's step: 9/8 bytes for each packed direction, where dense layers hold the 2
of autocast's copy, and 2 more where a direction is dense.
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
    """Computes the sparse weight of one layer from its dense one."""

    def __call__(
        self, weight: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The sparse weight (rows, columns) and its transpose, contiguous, in `dtype`; each where it is asked for."""
        ...


class SparseOperand:
    """The sparse weight of one layer.

    Args:
        both: whether it is 2:4 in its columns, too.
        remembered: whether its forms may be kept; not those of a weight that FSDP gathers and frees.
    """

    def __init__(self, prune: Pruning, *, both: bool, remembered: bool = True) -> None:
        self.prune, self.both, self.remembered = prune, both, remembered
        self.needs_dense = False  # a direction is multiplied densely, so that the pruned weight is worth keeping
        self.number = next(_numbers)
        self._key: tuple[Any, ...] = ()
        self._forms: WeightForms | None = None
        self._imagined: Tensor | None = None
        operands[self.number] = self

    def forms(self, weight: Tensor, dtype: torch.dtype) -> WeightForms:
        """Those that are there, if the weight is still the same; in a CUDA graph new ones, as it runs again later."""
        if not self.remembered or weight.is_inference() or capturing():
            return WeightForms(self, weight, dtype, both=False)
        key = (weight.data_ptr(), weight._version, weight.dtype, dtype)
        if self._forms is None or key != self._key:
            self._key, self._forms = key, WeightForms(self, weight, dtype, both=self.both)
        return self._forms

    def imagine(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Hold as many bytes as the forms of a step, for a weight that is fake: what its memory is predicted by."""
        kept = 2 * _PACKED if self.both else _PACKED + 1  # dense in the backward pass, where columns are not 2:4
        if self._imagined is None:
            self._imagined = weight.new_empty(round(weight.numel() * kept), dtype=dtype)

    def forget(self) -> None:
        self._key, self._forms, self._imagined = (), None, None


operands: WeakValueDictionary[int, SparseOperand] = WeakValueDictionary()
"""By their numbers, which operators can take where they cannot take objects."""
_numbers = count()
_PACKED = 9 / 16  # entries of a packed weight over those of the weight


class WeightForms:
    """The forms of one weight as it is now, each made when it is first needed.

    Args:
        both: whether to pack both directions when the first is needed.
    """

    def __init__(self, operand: SparseOperand, weight: Tensor, dtype: torch.dtype, *, both: bool) -> None:
        self.operand, self.weight, self.dtype, self.both = operand, weight.detach(), dtype, both
        self._dense: Tensor | None = None
        self._packed: dict[bool, Tensor] = {}

    def dense(self) -> Tensor:
        """(rows, columns)."""
        self._dense = self._straight()
        return self._dense

    def packed(self, *, transposed: bool) -> Tensor:
        """One direction, for cuSPARSELt."""
        if transposed not in self._packed:
            made = self.pack(transposed=transposed)
            self._packed |= dict(zip((transposed, not transposed), made, strict=False))
        return self._packed[transposed]

    def pack(self, *, transposed: bool) -> list[Tensor]:
        """Pack one direction anew, and after it the other one where both are wanted."""
        if not self.both:
            return [cslt_compress(self._pruned(transposed=True) if transposed else self._straight())]
        shape, device = self.weight.shape, self.weight.device
        if tiles_fit(shape, self.dtype, device, self._straight):
            packed = packed_both(self._straight())
            return [packed[transposed], packed[not transposed]]
        straight, other = self.operand.prune(self.weight, self.dtype, straight=True, transposed=True)
        assert straight is not None and other is not None
        if self.operand.needs_dense:
            self._dense = straight
        pair = (other, straight) if transposed else (straight, other)
        return [cslt_compress(each) for each in pair]

    def _straight(self) -> Tensor:
        """The pruned weight, kept where a dense product will want it, too."""
        if self._dense is not None:
            return self._dense
        straight = self._pruned(transposed=False)
        if self.operand.needs_dense:
            self._dense = straight
        return straight

    def _pruned(self, *, transposed: bool) -> Tensor:
        made = self.operand.prune(self.weight, self.dtype, straight=not transposed, transposed=transposed)[transposed]
        assert made is not None
        return made


@torch.library.custom_op("shoestring::times_weight_24", mutates_args=())
def times_weight(dense: Tensor, weight: Tensor, operand: int, transposed: bool, by_columns: bool) -> Tensor:
    """What a sparse layer multiplies: with its weight in the forward pass, with the transpose for input gradients.

    Args:
        dense: (tokens, columns), or (tokens, rows) with `transposed`, in 16 bits.
        weight: (rows, columns), the dense one that is trained.
        operand: the number of its `SparseOperand`.
        by_columns: the layout of the result.

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
