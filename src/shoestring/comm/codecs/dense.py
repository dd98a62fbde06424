"""Gradients whole, as fp32 or rounded to bf16: what every other codec is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads, Mean


class DenseCodec(Codec):
    """The plain average; `dtype` is what travels and what a ring adds in, each gradient's own where it is None."""

    stages = 1

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        alike: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads.values():
            alike.setdefault(self.dtype or grad.dtype, []).append(grad)
        answers = yield [Mean(flatten(tensors, dtype)) for dtype, tensors in alike.items()]
        for flat, tensors in zip(answers, alike.values(), strict=True):
            unflatten(flat, tensors)


def flatten(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """All entries as one 1-d tensor of `dtype`, a copy."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    foreach_copy_(split_like(flat, tensors), tensors)
    return flat


def unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    """The inverse of `flattened`, into `tensors`."""
    foreach_copy_(tensors, split_like(flat, tensors))


def split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Parts of `flat` in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
