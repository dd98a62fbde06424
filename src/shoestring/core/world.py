"""The ranks of a job: their mesh, this rank's device, and collectives that exchange bytes and errors."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoestring import facts
from shoestring._torch import flattened, own_device, wait_as_the_world
from shoestring.collectives import broadcast_bytes, gather_bytes
from shoestring.core.errors import ConfigError, ShoestringError, WorldError
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.leases import HostMemory

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of one job, and the mesh that they form. `World()` is a single process.

    Ranks are numbered along the mesh, with the last axis varying fastest. `local_size` consecutive ranks run on one
    host, however the mesh is split into axes. So code about a machine (its memory, its disk) uses `hosts` and
    `host_of`, and code about the model or its data uses the axes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory: HostMemory = field(default_factory=HostMemory, compare=False, repr=False)
    """Budget and leases of the host memory that this rank may use for large buffers."""
    store: Any = field(default=None, compare=False, repr=False)
    """Key-value store that `join` created. It holds the numbers of `note`, which ranks read if a collective fails."""
    layout: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Size of each mesh axis, the slowest first; empty for the default, hosts x ranks per host. `split` adds axes."""
    # Holds worlds after a split, and meshes. Each is created only once: a mesh creates process groups, which all ranks
    # must do in the same order.
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.layout and math.prod(self.layout.values()) != self.size:
            axes = " x ".join(f"{size} ({axis})" for axis, size in self.layout.items())
            raise WorldError(f"a mesh of {axes} ranks does not fit {self.size} ranks")

    @property
    def hosts(self) -> int:
        return self.size // self.local_size

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes logs and files for all ranks."""
        return self.rank == 0

    @property
    def host(self) -> str:
        return socket.gethostname()

    def host_of(self, rank: int) -> int:
        """Index, from 0, of the host that a rank runs on."""
        return rank // self.local_size

    # -- the mesh ----------------------------------------------------------------------------------------------------

    @cached_property
    def axes(self) -> dict[str, int]:
        """Size of each mesh axis, the slowest first; their product is `size`."""
        return dict(self.layout) or {HOSTS: self.hosts, LOCAL: self.local_size}

    def split(self, axis: str, added: str, size: int) -> World:
        """Split `axis` into `axis` itself, with fewer ranks, and the axis `added` of `size` ranks, which varies faster.

        A world that already has the axis `added` is returned unchanged. Repeating the same split returns the same
        world, so that its process groups are created only once.

        Raises:
            WorldError: the number of ranks along `axis` is not a multiple of `size`, or the mesh already has an axis
                `added` of a different size.
        """
        if self.axes.get(added, size) != size:
            raise WorldError(f"the mesh already has an axis {added} of {self.axes[added]} ranks, not {size}")
        if added in self.axes:
            return self
        if size < 1 or self.axes.get(axis, 1) % size:
            raise WorldError(
                f"the {self.axes.get(axis, 1)} ranks over {axis} cannot be split into groups of {size} for {added}"
            )
        if (axis, added, size) not in self._cache:
            layout = {}
            for name, ranks in self.axes.items():
                layout |= {name: ranks // size, added: size} if name == axis else {name: ranks}
            self._cache[axis, added, size] = replace(self, layout=layout)
        return self._cache[axis, added, size]

    def ranks_over(self, axes: Collection[str]) -> int:
        """Number of ranks along `axes`; an axis that the mesh does not have counts as one rank."""
        return math.prod(size for axis, size in self.axes.items() if axis in axes)

    def index_over(self, axes: Collection[str]) -> int:
        """This rank's index among the ranks along `axes`, from 0."""
        index, stride = 0, self.size
        for axis, size in self.axes.items():
            stride //= size
            if axis in axes:
                index = index * size + self.rank // stride % size
        return index

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """torch's device mesh with all axes; None for one process. The first access is a collective."""
        if self.size == 1:
            return None
        sizes, names = tuple(self.axes.values()), tuple(self.axes)
        return wait_as_the_world(init_device_mesh(self.device.type, sizes, mesh_dim_names=names))

    def mesh_over(self, axes: Collection[str]) -> DeviceMesh | None:
        """The ranks along `axes` as a one-dimensional mesh; None if this is only one rank.

        A collective: all ranks call it for the same axes, in the same order.
        """
        if self.ranks_over(axes) == 1:
            return None
        several = tuple(axis for axis, size in self.axes.items() if axis in axes and size > 1)
        if several not in self._cache:
            assert self.mesh is not None
            self._cache[several] = flattened(self.mesh, several)
        return self._cache[several]

    def group(self, axes: Collection[str]) -> dist.ProcessGroup | None:
        """The process group of the ranks along `axes`; None if this is only one rank. A collective like `mesh_over`."""
        if self.ranks_over(axes) == self.size > 1:
            return dist.group.WORLD
        mesh = self.mesh_over(axes)
        return None if mesh is None else mesh.get_group()

    def differs_along(self, axis: str, values: Sequence[object]) -> bool:
        """Whether `values`, one per rank, differ between ranks with the same position on all axes except `axis`."""
        stride = math.prod(list(self.axes.values())[list(self.axes).index(axis) + 1 :])
        first = (rank - rank // stride % self.axes[axis] * stride for rank in range(self.size))
        return any(values[rank] != values[of] for rank, of in enumerate(first))

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def note(self, what: str, value: int) -> None:
        """Write a number under the key `what` to the store, for other ranks to read if a collective fails."""
        if self.store is not None:
            self.store.set(f"{what}/{self.rank}", str(value))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, data: bytes, group: Any = None) -> list[bytes]:
        """All-gather bytes of any length over all ranks, in one round if the data of every rank are short.

        Ranks exchange bytes instead of objects, so that no rank unpickles what it receives.

        Args:
            group: process group to use instead of the default one; it must hold all ranks and use this world's device.
        """
        return [data] if self.size == 1 else gather_bytes(data, self.size, self.device, group)

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Broadcast the bytes of rank `source` to all ranks; the `data` of other ranks is ignored."""
        return data or b"" if self.size == 1 else broadcast_bytes(data or b"", source, self.device)

    def agree(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank; if it raises a ShoestringError on any rank, raise that error on all ranks."""
        result, own = None, None
        try:
            result = work()
        except ShoestringError as error:
            own = error
        for rank, data in enumerate(self.gather(json.dumps(own and own.parts()).encode())):
            if parts := json.loads(data):
                raise own or ShoestringError.from_parts(parts, f"rank {rank}: ")
        return cast(T, result)

    def decide(self, work: Callable[[], Any]) -> Any:
        """Call `work` on the first rank; on all ranks, return its result (of JSON types) or raise its error."""
        return json.loads(self.broadcast(json.dumps(self.agree(lambda: work() if self.first else None)).encode()))

    def alike(self, own_facts: Mapping[str, Any], hint: str) -> None:
        """Raise ConfigError on all ranks if `own_facts` differ between ranks.

        The message names the key, the values and the ranks.
        """
        if dist.is_initialized() and (message := facts.difference(self.gather(facts.encode(own_facts)))):
            raise ConfigError(message, hint=hint)

    @classmethod
    def current(cls) -> World:
        """The world of the process group that this program has initialised; without one, the world of one process.

        Raises:
            WorldError: several ranks were started but have not joined, so each would train a separate model.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if os.environ.get("WORLD_SIZE", "1") != "1":
                raise WorldError("several ranks were started, but have not joined", hint="use `with ss.join():`")
            return cls(device=own_device(0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % local_size))
        on_gpu = "nccl" in dist.get_backend_config()  # `get_backend` is "undefined" if the program named no backend
        device = own_device(local_rank) if on_gpu else torch.device("cpu")
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device)
