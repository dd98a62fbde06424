"""Requests of codecs as collectives: whatever one yield asks for travels in at most one collective of each kind."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoestring._torch import all_gather_single, name_groups_from, timeout_of
from shoestring.comm.codecs.codec import Codec, Gather, Grads, Mean, Request, Swap, Turn, itself
from shoestring.core.errors import ShoestringError
from shoestring.core.trace import span

Answer = Callable[[], list[Tensor]]
SMALL = 2**19  # bytes
FIRST = torch.finfo(torch.float32).max  # of first answers, which ranks must judge alike though they may differ
LATER = 2.0**100  # of later ones, which are equal on all ranks: what is decoded from them does not overflow
ALIGNMENT = 16  # bytes: a packed tensor starts where a view of any dtype may


class Wire:
    """A process group of its own over the ranks of `group`, so that no other traffic can come between its own.

    Its collectives must be started from one thread, and in the same order on all ranks. All ranks of the world make one
    at the same time, each of its own group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, 1, device
        self.sent = 0  # bytes that left this rank, by the collectives' ring forms
        self.group = None
        if group is not None:
            self.group = twin(group, device)
            self.rank, self.size = dist.get_rank(self.group), self.group.size()

    @property
    def timeout(self) -> float:
        """Seconds that a collective waits for another rank."""
        return 0.0 if self.group is None else timeout_of(self.group).total_seconds()

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, codec: Codec, grads: Grads, step: int, total: Callable[[Tensor], Tensor] = itself) -> bool:
        """One whole exchange: `grads` become the average over the ranks. False, and NaN, where one was not finite."""
        with closing(codec.code(grads, Turn(self.rank, self.size, step, total))) as coding:
            with span("encode", "compute"):
                requests = next(coding, None)
            largest = FIRST
            while requests is not None:
                answers = self.start(requests)()
                with span("code", "compute"):
                    if not all_finite(answers, largest):
                        coding.close()  # while gradients are there, which it may need to undo what it did
                        for grad in grads.values():
                            grad.fill_(torch.nan)
                        return False
                    largest = LATER
                    try:
                        requests = coding.send(answers)
                    except StopIteration:
                        requests = None
        return True

    def start(self, requests: Sequence[Request]) -> Answer:
        """Hand over what travels; the returned function waits for it and gives one answer for each request.

        Raises (both): RuntimeError, from torch, when a rank is lost or late.
        """
        if self.group is None and self.size > 1:
            raise ShoestringError("an exchange between ranks was started after its job was closed")
        answers: list[Tensor | None] = [None] * len(requests)
        waits = [*self._means(requests, answers), *self._bytes(requests, answers)]
        marks = [span(name, "wire", nbytes).__enter__() for name, nbytes, _ in waits]
        self.sent += sum(nbytes for _, nbytes, _ in waits)

        def wait() -> list[Tensor]:
            for mark, (name, nbytes, finish) in zip(marks, waits, strict=True):
                with naming(f"{name} of {nbytes} bytes between {self.size} ranks"):
                    finish()
                mark.__exit__(None, None, None)
            return [answer for answer in answers if answer is not None]

        return wait

    def _means(self, requests: Sequence[Request], answers: list[Tensor | None]) -> Iterator[tuple[str, int, Callable]]:
        means = [(index, each.tensor) for index, each in enumerate(requests) if isinstance(each, Mean)]
        for _, group in groupby(sorted(means, key=lambda pair: str(pair[1].dtype)), key=lambda pair: pair[1].dtype):
            indices, tensors = zip(*group, strict=True)
            whole = len(tensors) == 1 and tensors[0].is_contiguous()
            flat = tensors[0].view(-1) if whole else torch.cat([tensor.reshape(-1) for tensor in tensors])
            for index, tensor, part in zip(indices, tensors, flat.split([t.numel() for t in tensors]), strict=True):
                answers[index] = part.view(tensor.shape)
            if self.group is None:
                continue
            finish = self._by_owners(flat) if self._small(flat) else self._in_a_ring(flat)
            yield "all-reduce", 2 * (self.size - 1) * flat.nbytes // self.size, finish

    def _small(self, tensor: Tensor) -> bool:
        """Whether a message is all latency: Gloo's ring then takes twice as long as sending to every rank at once."""
        return tensor.device.type == "cpu" and tensor.nbytes <= SMALL

    def _by_owners(self, flat: Tensor) -> Callable[[], object]:
        """Average `flat` in two steps: rank r averages the r-th part of all, and tells it to all."""
        parts = F.pad(flat, (0, -flat.numel() % self.size)).view(self.size, -1)
        found = torch.empty_like(parts)
        work = dist.all_to_all_single(found, parts, group=self.group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            own = found.mean(0, dtype=torch.promote_types(found.dtype, torch.float32)).to(found.dtype)
            dist.all_to_all_single(found, own.expand_as(parts).contiguous(), group=self.group)
            flat.copy_(found.view(-1)[: flat.numel()])

        return finish

    def _in_a_ring(self, flat: Tensor) -> Callable[[], object]:
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            flat.div_(self.size)

        return finish

    def _bytes(self, requests: Sequence[Request], answers: list[Tensor | None]) -> Iterator[tuple[str, int, Callable]]:
        for kind, name in ((Gather, "all-gather"), (Swap, "all-to-all")):
            asked = [(index, each.tensor) for index, each in enumerate(requests) if isinstance(each, kind)]
            if not asked:
                continue
            rows = 1 if kind is Gather else self.size
            mine = torch.cat([_rows_of_bytes(tensor, rows) for _, tensor in asked], dim=1)
            theirs = torch.empty(self.size, mine.shape[1], dtype=torch.uint8, device=mine.device)
            start = 0
            for index, tensor in asked:
                shape = tensor.shape if kind is Gather else tensor.shape[1:]
                length = shape.numel() * tensor.element_size()
                answers[index] = theirs[:, start : start + length].view(tensor.dtype).unflatten(1, shape or (1,))
                if not shape:
                    answers[index] = answers[index][:, 0]  # pyright: ignore[reportOptionalSubscript]
                start += length + -length % ALIGNMENT
            if self.group is None:
                theirs.copy_(mine)
                continue
            if kind is Gather and not self._small(mine):
                work = all_gather_single(theirs.view(-1), mine.view(-1), group=self.group, async_op=True)
                yield name, (self.size - 1) * mine.nbytes, _waiting(work)
            else:
                rows = mine.expand_as(theirs).contiguous()  # of a gather, the same one for all
                work = dist.all_to_all_single(theirs, rows, group=self.group, async_op=True)
                yield name, (self.size - 1) * rows.nbytes // self.size, _waiting(work)


def twin(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another process group of the same ranks; every rank of the world calls it, each with its own `group`.

    Its collectives wait as long as the world's do: groups of a device mesh have torch's default of half an hour.
    """
    mine, timeout = dist.get_process_group_ranks(group), timeout_of(dist.distributed_c10d._get_default_group())
    rows = torch.empty(dist.get_world_size(), 2, dtype=torch.int64, device=device)
    with naming("the process groups of an exchange, made by all ranks at once"):
        all_gather_single(rows.view(-1), torch.tensor([mine[0], secrets.randbits(32)], device=device))
    parts: dict[int, list[int]] = {}
    for rank, first in enumerate(rows[:, 0].tolist()):
        parts.setdefault(first, []).append(rank)
    # A store that outlives its ranks still has the addresses of the groups that they made: new ones need other names.
    name_groups_from(int(rows[0, 1]) + 1_000_000)
    # Every rank makes every group. torch can leave out the others' (use_local_synchronization), but then names a new
    # group as it named one that is gone.
    with naming("the process groups of an exchange, connecting"):
        made = {first: dist.new_group(ranks, timeout) for first, ranks in parts.items()}
        own = made[mine[0]]
        assert isinstance(own, dist.ProcessGroup)
        dist.barrier(own)  # a rank that closes its group at once would cut off those that are still connecting to it
    return own


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say of an exchange that fails inside, because a rank is lost or late, what it was."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise type(error)(f"{what}: {error}") from error


def _waiting(work: dist.Work | None) -> Callable[[], object]:
    assert work is not None
    return work.wait


def _rows_of_bytes(tensor: Tensor, rows: int) -> Tensor:
    """As (rows, bytes), padded to the alignment."""
    flat = tensor.contiguous().view(rows, -1)
    flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(rows, 0, dtype=torch.uint8)
    return F.pad(flat, (0, -flat.shape[1] % ALIGNMENT))


def all_finite(tensors: Sequence[Tensor], largest: float = FIRST) -> bool:
    """Whether every floating-point entry is at most `largest` in magnitude, and no NaN; waits for the device."""
    bounds = [bound for t in tensors if t.is_floating_point() and t.numel() for bound in t.aminmax()]
    return bool((torch.stack([bound.float() for bound in bounds]).abs() <= largest).all()) if bounds else True
