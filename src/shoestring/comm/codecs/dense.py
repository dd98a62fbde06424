"""Uncompressed gradients, in fp32 or rounded to bf16: the baseline for every other codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs import fused
from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads, Mean


class DenseCodec(Codec):
    """Averages gradients without compression. Gradients are sent and summed in `dtype`; None leaves each gradient in
    its own type."""

    stages = 1

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def guards(self, grads: Grads) -> bool:
        """See `Codec`; true where a kernel can set gradients to NaN. The codec has no state to restore."""
        return all(fused.is_available(grad.device) for grad in grads.values())

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        answers = yield [Mean(join(tensors, dtype)) for dtype, tensors in self._by_dtype(grads).items()]
        for answer in answers:
            context.verdict.spoil(answer)
        self.decode_average(grads, answers, context)

    @property
    def replays(self) -> bool:
        return True

    def decode_average(self, grads: Grads, answers: Sequence[Tensor], context: ExchangeContext) -> None:
        """See `Codec`."""
        for flat, tensors in zip(answers, self._by_dtype(grads).values(), strict=True):
            if flat.data_ptr() != tensors[0].data_ptr():  # addresses are equal if averaged in place
                unflatten(flat, tensors)

    def _by_dtype(self, grads: Grads) -> dict[torch.dtype, list[Tensor]]:
        """Group the gradients by the data type in which they are sent."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads.values():
            groups.setdefault(self.dtype or grad.dtype, []).append(grad)
        return groups


def join(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """All entries as one 1-d tensor of `dtype`: a view if the tensors follow each other in memory, else a copy.

    A view is possible in a DDP bucket that holds exactly these gradients in this order.
    """
    first, place = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        there = tensor.untyped_storage().data_ptr() == memory and tensor.data_ptr() == place
        if not there or tensor.dtype != dtype or not tensor.is_contiguous():
            return flatten(tensors, dtype)
        place += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def flatten(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Copy all entries into one 1-d tensor of `dtype`."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    foreach_copy_(split_like(flat, tensors), tensors)
    return flat


def unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the entries of `flat` back into `tensors`; the inverse of `flatten`."""
    foreach_copy_(tensors, split_like(flat, tensors))


def split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Split `flat` into views in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
