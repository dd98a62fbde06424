"""A process group of all ranks on the CPU, for the exchanges of checkpoints while training continues."""

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

PIECE = 4 << 20  # maximum size of a message in bytes


@dataclass(frozen=True)
class RankGroup:
    """Communicates between all ranks; used by one thread at a time. `process_group` is None for a single rank."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    purpose: str = "checkpoints"
    """Purpose of the exchanges, as a text for the error if an exchange fails or times out."""
    patience: float = PATIENCE
    """Seconds after which an exchange times out."""

    @classmethod
    def join(cls, world: World, purpose: str = "checkpoints") -> RankGroup:
        """Create a new group of all ranks; a collective."""
        if world.size == 1:
            return cls(0, 1, None, purpose)
        assert dist.group.WORLD is not None
        # torchrun gives restarted ranks the same store as the ranks that died. torch names groups by a counter that
        # starts at 0 in every process. So a group without a random name would read the addresses of dead ranks from the
        # store.
        name_groups_from(int.from_bytes(world.broadcast(secrets.token_bytes(4) if world.first else None)) + 1_000_000)
        timeout: timedelta = timeout_of(dist.group.WORLD)
        with naming(f"all ranks to join the group for {purpose}"):
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            dist.barrier(group)  # no rank may destroy the group while other ranks still connect
        return cls(world.rank, world.size, group, purpose, timeout.total_seconds())

    def close(self) -> None:
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length; returns one entry for each rank."""
        with naming(self._all):
            return World(self.rank, self.size).gather(data, self.process_group)

    @property
    def _all(self) -> str:
        return f"all ranks, for {self.purpose}"

    def all_gather(self, value: object) -> list:
        """All-gather a value that JSON can represent; returns one entry for each rank."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(value).encode())]

    def all_reduce_min(self, values: Sequence[float]) -> Pending:
        """Start an all-reduce that computes the minimum of each value over all ranks."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        work = None
        if self.process_group is not None:
            with naming(self._all):
                work = dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self.process_group, async_op=True)
        return Pending(numbers, work, self._all)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> set[int]:
        """Send and receive contiguous tensors to and from any ranks at once, in messages of at most `PIECE` bytes with
        checksums.

        If a rank sends several tensors to another rank, both ranks must list these tensors in the same order.

        Args:
            sends: (rank to send to, tensor).
            receives: (rank to receive from, tensor to receive into).

        Returns:
            The ranks whose data arrived damaged. No error is raised, because the other ranks do not know of the damage
            and continue with their next exchange; the caller must report the damage in that exchange.
        """
        to_self, from_self = ([pair for pair in pairs if pair[0] == self.rank] for pairs in (sends, receives))
        for (_, data), (_, room) in zip(to_self, from_self, strict=True):
            room.copy_(data)
        sends, receives = ([pair for pair in pairs if pair[0] != self.rank] for pairs in (sends, receives))
        # Post all receives first, so that no sender waits for a receiver that is busy with another message.
        arriving = [(rank, view, torch.zeros(1, dtype=torch.int64)) for rank, view in _messages(receives)]
        works = [
            (dist.irecv(view, rank, group=self.process_group), dist.irecv(mark, rank, group=self.process_group))
            for rank, view, mark in arriving
        ]
        # Send a few messages at a time, so that training's own messages can be sent in between.
        messages = list(_messages(sends))
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
        damaged = set[int]()
        for (rank, view, mark), pair in zip(arriving, works, strict=True):
            self._wait(rank, pair)
            if crc32(view.numpy().data) != int(mark):
                damaged.add(rank)
        return damaged

    def start_exchange(self, send: tuple[int, Tensor], receive: tuple[int, Tensor]) -> Callable[[], None]:
        """Start to send a contiguous tensor to a rank and to receive a tensor from a rank; returns a function that
        waits for both transfers."""
        works = (
            dist.irecv(receive[1], receive[0], group=self.process_group),
            dist.isend(send[1], send[0], group=self.process_group),
        )

        def wait() -> None:
            self._wait(receive[0], works[:1])
            self._wait(send[0], works[1:])

        return wait

    def _wait(self, rank: int, works: Sequence[dist.Work | None]) -> None:
        with naming(f"rank {rank}, for {self.purpose}"):
            for work in works:
                assert work is not None
                work.wait()


@dataclass(frozen=True)
class Pending:
    """An all-reduce that has been started; `wait` returns its result."""

    numbers: Tensor
    work: dist.Work | None
    awaited: str

    def wait(self) -> list[float]:
        if self.work is not None:
            with naming(self.awaited):
                self.work.wait()
        return self.numbers.tolist()


def _messages(tensors: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Split tensors into messages of `PIECE` bytes, and interleave the messages of different ranks, so that all links
    are busy at once."""
    views = [(rank, tensor.reshape(-1).view(torch.uint8)) for rank, tensor in tensors if tensor.numel()]
    longest = max((len(view) for _, view in views), default=0)
    for start in range(0, longest, PIECE):
        for rank, view in views:
            if start < len(view):
                yield rank, view[start : start + PIECE]
