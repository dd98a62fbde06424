"""Exchanges the values of tensors during an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from shoestring.sharded import local_part


@contextmanager
def swapped(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager during which `tensors` hold `values`, matched by name. Meanwhile `values` hold the original
    contents of `tensors`, so that the exchange needs extra memory for one tensor only."""
    pairs = [(local_part(tensors[name]).detach(), local_part(value)) for name, value in values.items()]

    def swap() -> None:
        for tensor, value in pairs:
            contents = tensor.clone()
            tensor.copy_(value)
            value.copy_(contents)

    swap()
    try:
        yield
    finally:
        swap()
