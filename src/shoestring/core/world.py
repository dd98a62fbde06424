"""Who runs: the ranks, the mesh they form, this rank's device, and the few exchanges the product itself needs."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoestring._torch import flattened, wait_as_the_world
from shoestring.core.errors import ShoestringError, WorldError
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.leases import HostMemory

T = TypeVar("T")
HEAD = 1 << 10  # bytes that travel with the length of what is gathered


@dataclass(frozen=True)
class World:
    """The ranks of one job, and the mesh that they form. `World()` is one process alone.

    Ranks are numbered along the mesh, its last axis fastest. `local_size` consecutive ranks run on one host, whatever
    the axes: what concerns a machine (its memory, its disk) asks `hosts` and `host_of`, and what concerns the model
    or its data asks the axes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory: HostMemory = field(default_factory=HostMemory, compare=False, repr=False)
    """What this rank may take of its host's."""
    layout: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Size of each mesh axis, the slowest first; empty for hosts x ranks of a host. `split` adds axes."""
    # Splits and meshes that were made already.
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.layout and math.prod(self.layout.values()) != self.size:
            axes = " x ".join(f"{size} ({axis})" for axis, size in self.layout.items())
            raise WorldError(f"a mesh of {axes} ranks does not have the {self.size} ranks that there are")

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

    def host_of(self, rank: int) -> int:
        """The number of the host that a rank runs on."""
        return rank // self.local_size

    # -- the mesh ----------------------------------------------------------------------------------------------------

    @cached_property
    def axes(self) -> dict[str, int]:
        """Size of each mesh axis, the slowest first; their product is `size`."""
        return dict(self.layout) or {HOSTS: self.hosts, LOCAL: self.local_size}

    def split(self, axis: str, added: str, size: int) -> World:
        """The same ranks with a new axis of `size`, taken out of `axis` and faster than it.

        A world that has the axis is left as it is, and the same split of one world is the same world, so that it has
        its process groups once.

        Raises:
            WorldError: the ranks along `axis` do not divide by `size`, or the mesh has the axis in another size.
        """
        if self.axes.get(added, size) != size:
            raise WorldError(f"the mesh has an axis {added} of {self.axes[added]} ranks, which cannot have {size}")
        if added in self.axes:
            return self
        if size < 1 or self.axes.get(axis, 1) % size:
            raise WorldError(f"the {self.axes.get(axis, 1)} ranks over {axis} do not divide into {added} of {size}")
        if (axis, added, size) not in self._cache:
            layout = {}
            for name, ranks in self.axes.items():
                layout |= {name: ranks // size, added: size} if name == axis else {name: ranks}
            self._cache[axis, added, size] = replace(self, layout=layout)
        return self._cache[axis, added, size]

    def ranks_over(self, axes: Collection[str]) -> int:
        """How many ranks the mesh has along `axes`; an axis that it does not have has one."""
        return math.prod(size for axis, size in self.axes.items() if axis in axes)

    def index_over(self, axes: Collection[str]) -> int:
        """This rank's place among those along `axes`: 0 for the first of them."""
        index, stride = 0, self.size
        for axis, size in self.axes.items():
            stride //= size
            if axis in axes:
                index = index * size + self.rank // stride % size
        return index

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh with all axes; None for one process alone. All ranks ask for it first at the same time."""
        if self.size == 1:
            return None
        sizes, names = tuple(self.axes.values()), tuple(self.axes)
        return wait_as_the_world(init_device_mesh(self.device.type, sizes, mesh_dim_names=names))

    def mesh_over(self, axes: Collection[str]) -> DeviceMesh | None:
        """The ranks along `axes` as a mesh of one dimension; None where this rank is alone along them.

        All ranks ask for the same axes, in the same order of calls.
        """
        if self.ranks_over(axes) == 1:
            return None
        several = tuple(axis for axis, size in self.axes.items() if axis in axes and size > 1)
        if several not in self._cache:
            assert self.mesh is not None
            self._cache[several] = flattened(self.mesh, several)
        return self._cache[several]

    def group(self, axes: Collection[str]) -> dist.ProcessGroup | None:
        """The process group along `axes`; see `mesh_over`."""
        if self.ranks_over(axes) == self.size > 1:
            return dist.group.WORLD
        mesh = self.mesh_over(axes)
        return None if mesh is None else mesh.get_group()

    # -- exchanges ---------------------------------------------------------------------------------------------------

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
        for rank, data in enumerate(self.gather(json.dumps(mine and mine.parts()).encode())):
            if theirs := json.loads(data):
                raise mine or ShoestringError.from_parts(theirs, f"rank {rank}: ")
        return cast(T, result)

    def decide(self, work: Callable[[], Any]) -> Any:
        """Do `work` on the first rank; its result (of JSON types), or its ShoestringError, is every rank's."""
        return json.loads(self.broadcast(json.dumps(self.agree(lambda: work() if self.first else None)).encode()))

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
        device = own_device(local_rank) if on_gpu else torch.device("cpu")
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device)


def own_device(local_rank: int) -> torch.device:
    """The GPU of a local rank, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
