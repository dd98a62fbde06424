"""Sends activations between the stages of a pipeline, and gradients in the opposite direction."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.core.trace import span

Key = tuple[int, int]
"""Identifies a message: (index of the part of the model that receives the activations, index of the micro-batch)."""
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DIMS = 8


class TensorForm(NamedTuple):
    """Shape and data type of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tensor.dtype)

    def encoded(self, device: torch.device) -> Tensor:
        numbers = [_TYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (_DIMS + 2 - len(numbers)), device=device)

    @classmethod
    def received(cls, group: dist.ProcessGroup, source: int, device: torch.device) -> TensorForm:
        numbers = torch.empty(_DIMS + 2, dtype=torch.int64, device=device)
        dist.recv(numbers, group=group, group_src=source)
        dtype, dims, *shape = numbers.tolist()
        return cls(tuple(shape[:dims]), _TYPES[dtype])


class Inbox:
    """Receives the messages of one stage, in the order in which that stage sends them.

    Args:
        keys: the messages, in that order.
        known: function that returns the form of a message; None if the form is not known yet.
        asked: function that receives the form of a message from the sender.
        early: number of messages for which a receive is posted before they are needed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        keys: Iterable[Key],
        known: Callable[[Key], TensorForm | None],
        asked: Callable[[Key], TensorForm],
        device: torch.device,
        early: int,
    ) -> None:
        self.group, self.source, self.known, self.asked = group, source, known, asked
        self.device, self.early, self.waited = device, early, 0.0
        self._expected = deque(keys)
        self._posted: dict[Key, tuple[Tensor, dist.Work]] = {}

    def take(self, key: Key) -> Tensor:
        """Wait for a message, and return it."""
        began = time.perf_counter()
        while key not in self._posted:
            first = self._expected[0]
            self._post(self.known(first) or self.asked(first))
        tensor, work = self._posted.pop(key)
        while self._expected and len(self._posted) < self.early and (form := self.known(self._expected[0])):
            self._post(form)
        with span("pipeline", "wire", tensor.nbytes):
            work.wait()
        self.waited += time.perf_counter() - began
        return tensor

    def _post(self, form: TensorForm) -> None:
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        work = dist.irecv(tensor, group=self.group, group_src=self.source)
        assert work is not None
        self._posted[self._expected.popleft()] = tensor, work


class Outbox:
    """Sends messages to one stage, while this stage computes."""

    def __init__(self, group: dist.ProcessGroup, target: int) -> None:
        self.group, self.target = group, target
        self.sent, self.waited = 0, 0.0
        self._going: dict[Key, list[tuple[Tensor, dist.Work]]] = {}

    def send(self, key: Key, *tensors: Tensor) -> None:
        """Start to send a message; if the other stage does not know its form, `tensors` begins with the form."""
        works = [dist.isend(tensor, group=self.group, group_dst=self.target) for tensor in tensors]
        self._going[key] = [(tensor, work) for tensor, work in zip(tensors, works, strict=True) if work is not None]
        self.sent += tensors[-1].nbytes

    def settle(self, *keys: Key) -> None:
        """Wait until messages are sent, by default all of them, and free their memory."""
        began = time.perf_counter()
        with span("pipeline", "wire"):
            for key in keys or [*self._going]:
                for _, work in self._going.pop(key):
                    work.wait()
        self.waited += time.perf_counter() - began
