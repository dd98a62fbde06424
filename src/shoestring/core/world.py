"""Who runs: the ranks, the mesh they form, this rank's device, and the few exchanges the product itself needs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoestring.core.errors import ShoestringError, WorldError
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.leases import HostMemory

T = TypeVar("T")
HEAD = 1 << 10  # bytes that travel with the length of what is gathered


@dataclass(frozen=True)
class World:
    """The ranks of one job as a mesh of hosts x ranks inside a host. `World()` is one process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory: HostMemory = field(default_factory=HostMemory, compare=False, repr=False)
    """What this rank may take of its host's."""

    @property
    def hosts(self) -> int:
        return self.size // self.local_size

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def host(self) -> str:
        return socket.gethostname()

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """The (hosts, local) device mesh; None for one process alone."""
        if self.size == 1:
            return None
        return init_device_mesh(self.device.type, (self.hosts, self.local_size), mesh_dim_names=(HOSTS, LOCAL))

    def ranks_over(self, dimensions: Sequence[str]) -> int:
        """How many ranks the mesh has along `dimensions`."""
        return (self.hosts if HOSTS in dimensions else 1) * (self.local_size if LOCAL in dimensions else 1)

    def group(self, dimensions: Sequence[str]) -> dist.ProcessGroup | None:
        """The process group along `dimensions`; None where that is this rank alone."""
        if self.ranks_over(dimensions) == 1:
            return None
        if self.ranks_over(dimensions) == self.size:
            return dist.group.WORLD
        assert self.mesh is not None
        return self.mesh.get_group(dimensions[0])

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, data: bytes, group: Any = None) -> list[bytes]:
        """The bytes of every rank, on every rank; where all are short, in one round.

        Bytes, not objects: nothing that arrives is unpickled.

        Args:
            group: another process group of all ranks, for this world's device.
        """
        if self.size == 1:
            return [data]
        heads = self._gathered(len(data).to_bytes(8, "little") + data[:HEAD], 8 + HEAD, group)
        lengths = [int.from_bytes(head[:8], "little") for head in heads]
        longest = max(lengths)
        whole = [head[8:] for head in heads] if longest <= HEAD else self._gathered(data, longest, group)
        return [each[:length] for each, length in zip(whole, lengths, strict=True)]

    def _gathered(self, data: bytes, width: int, group: Any) -> list[bytes]:
        mine = self._tensor(data.ljust(width, b"\0"))
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=group)
        return [each.cpu().numpy().tobytes() for each in theirs]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank."""
        if self.size == 1:
            return data or b""
        mine = self.rank == source
        length = torch.tensor([len(data or b"") if mine else 0], device=self.device)
        dist.broadcast(length, source)
        content = self._tensor(data or b"") if mine else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if len(content):
            dist.broadcast(content, source)
        return content.cpu().numpy().tobytes()

    def agree(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; if it fails with a ShoestringError on any, raise that on all of them."""
        result, mine = None, None
        try:
            result = work()
        except ShoestringError as error:
            mine = error
        for rank, data in enumerate(self.gather(json.dumps(mine and mine.described()).encode())):
            if theirs := json.loads(data):
                raise mine or ShoestringError.of(theirs, f"rank {rank}: ")
        return cast(T, result)

    def decide(self, work: Callable[[], Any]) -> Any:
        """Do `work` on the first rank; its result (of JSON types), or its ShoestringError, is every rank's."""
        result = self.agree(lambda: work() if self.first else None)
        return json.loads(self.broadcast(json.dumps(result).encode()))

    def _tensor(self, data: bytes) -> torch.Tensor:
        if not data:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    @classmethod
    def current(cls) -> World:
        """The world of the process group that is already initialised in this program, or one process alone.

        Raises:
            WorldError: several ranks were started, and have not joined: each would train a model of its own.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if os.environ.get("WORLD_SIZE", "1") != "1":
                raise WorldError("several ranks were started, but have not joined", hint="use `with ss.join():`")
            return cls(device=own_device(0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % local_size))
        on_gpu = "nccl" in dist.get_backend_config()  # where none was named, `get_backend` knows none
        return cls(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=local_rank,
            local_size=local_size,
            device=own_device(local_rank) if on_gpu else torch.device("cpu"),
        )


def own_device(local_rank: int) -> torch.device:
    """The GPU of a local rank, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
