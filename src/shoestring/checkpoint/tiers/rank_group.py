"""The ranks in a process group of their own, on CPU, for what is saved beside training."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import name_groups_from, timeout_of
from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.tiers.waits import PATIENCE, naming
from shoestring.core.world import World

PIECE = 4 << 20  # bytes of one message


@dataclass(frozen=True)
class RankGroup:
    """All ranks; None for `process_group` is one process alone. For use from one thread at a time."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    purpose: str = "checkpoints"
    """What its exchanges are for, in words; the error of one that fails or takes too long says so."""
    patience: float = PATIENCE
    """Seconds that an exchange may take."""

    @classmethod
    def join(cls, world: World, purpose: str = "checkpoints") -> RankGroup:
        """A group of its own for all ranks of a world; a collective."""
        if world.size == 1:
            return cls(0, 1, None, purpose)
        assert dist.group.WORLD is not None
        # torchrun gives ranks that it starts again the store of those that died: groups of the same names, which count
        # up from 0 in every program, would find the addresses of the dead there.
        name_groups_from(int.from_bytes(world.broadcast(secrets.token_bytes(4) if world.first else None)) + 1_000_000)
        timeout: timedelta = timeout_of(dist.group.WORLD)
        with naming(f"all ranks to join the group for {purpose}"):
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            dist.barrier(group)  # who destroys it soon must not cut off those that are still connecting
        return cls(world.rank, world.size, group, purpose, timeout.total_seconds())

    def close(self) -> None:
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, on every rank."""
        with naming(self._all):
            return World(self.rank, self.size).gather(data, self.process_group)

    @property
    def _all(self) -> str:
        return f"all ranks, for {self.purpose}"

    def all_gather(self, value: object) -> list:
        """A JSON value of every rank, on every rank."""
        return [json.loads(each) for each in self.all_gather_bytes(json.dumps(value).encode())]

    def all_reduce_min(self, values: Sequence[float]) -> Pending:
        """Start taking the least of each value over the ranks."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        work = None
        if self.process_group is not None:
            with naming(self._all):
                work = dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self.process_group, async_op=True)
        return Pending(numbers, work, self._all)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> set[int]:
        """Send and receive contiguous tensors, in messages of at most `PIECE` bytes, all pairs side by side.

        Between two ranks the tensors must be listed in one order. Each message carries its checksum.

        Returns:
            The ranks of which something else arrived than they sent: no error, for this rank alone knows, and the
            others are at their next exchange; they must be told there.
        """
        for (_, mine), (_, room) in zip(
            *([each for each in way if each[0] == self.rank] for way in (sends, receives)), strict=True
        ):
            room.copy_(mine)
        sends, receives = ([each for each in way if each[0] != self.rank] for way in (sends, receives))
        # All receives at once: a rank that sends must never wait for one that is at another message.
        arriving = [(rank, view, torch.zeros(1, dtype=torch.int64)) for rank, view in _messages(receives)]
        works = [
            (dist.irecv(view, rank, group=self.process_group), dist.irecv(mark, rank, group=self.process_group))
            for rank, view, mark in arriving
        ]
        self._send(list(_messages(sends)))
        damaged = set[int]()
        for (rank, view, mark), pair in zip(arriving, works, strict=True):
            self._wait(rank, pair)
            if crc32(view.numpy().data) != int(mark):
                damaged.add(rank)
        return damaged

    def start_exchange(self, send: tuple[int, Tensor], receive: tuple[int, Tensor]) -> Callable[[], None]:
        """Start to send one contiguous tensor to another rank, and to receive one; (): wait for both."""
        works = (
            dist.irecv(receive[1], receive[0], group=self.process_group),
            dist.isend(send[1], send[0], group=self.process_group),
        )

        def wait() -> None:
            self._wait(receive[0], works[:1])
            self._wait(send[0], works[1:])

        return wait

    def _send(self, messages: Sequence[tuple[int, Tensor]]) -> None:
        """A few messages at a time, so that training's own traffic gets its turn between them."""
        window = 2 * len({rank for rank, _ in messages})
        under_way: deque[tuple[int, Sequence[dist.Work | None]]] = deque()
        for rank, view in messages:
            mark = torch.tensor([crc32(view.numpy().data)])
            pair = dist.isend(view, rank, group=self.process_group), dist.isend(mark, rank, group=self.process_group)
            under_way.append((rank, pair))
            if len(under_way) >= window:
                self._wait(*under_way.popleft())
        for rank, pair in under_way:
            self._wait(rank, pair)

    def _wait(self, rank: int, works: Sequence[dist.Work | None]) -> None:
        with naming(f"rank {rank}, for {self.purpose}"):
            for work in works:
                assert work is not None
                work.wait()


@dataclass(frozen=True)
class Pending:
    """Numbers on their way."""

    numbers: Tensor
    work: dist.Work | None
    awaited: str

    def wait(self) -> list[float]:
        if self.work is not None:
            with naming(self.awaited):
                self.work.wait()
        return self.numbers.tolist()


def _messages(tensors: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Their bytes in pieces, the tensors of each rank in turn, so that no link waits for another's end."""
    rests = [(rank, _bytes(tensor)) for rank, tensor in tensors if tensor.numel()]
    longest = max((len(view) for _, view in rests), default=0)
    for start in range(0, longest, PIECE):
        for rank, view in rests:
            if start < len(view):
                yield rank, view[start : start + PIECE]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
