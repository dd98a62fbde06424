"""What the levels take of a host's memory. Given back first is what is held for other hosts, then the own slots; one
copy to write to disk from is always taken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.circle import Circle
from shoestring.core.leases import HostMemory
from shoestring.core.world import World

STAGING, OWN, HELD = "checkpoint staging", "checkpoint memory", "checkpoint peers"
"""The leases; their places are the orders in which they are given back, the last one first."""
_ORDERS = {name: order for order, name in enumerate((STAGING, OWN, HELD))}
_MOST = 7 / 8  # of what is free once training has what it needs
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of a cgroup of version 2 and 1: its limit, its use, and the line of `memory.stat` with what can be dropped."""


def share(circle: Circle, world: World, settings: Tiered, folder: Path) -> None:
    """Set a rank's part of its host's memory, unless it is set: what the user allows, or most of what is free now.

    What has been leased is in use by now, and what slots of an earlier start take will be filled again: neither is
    free, and both count as if it were. A collective.
    """
    there = 0
    with suppress(OSError):
        there = sum(path.stat().st_blocks * 512 for path in folder.glob("*"))
    host = world.rank // world.local_size * world.local_size
    free = min(circle.tell(free_memory() + there)[host : host + world.local_size])
    if settings.budget:
        world.memory.budget = settings.budget * 1e9 / world.local_size
    elif world.memory.budget == math.inf:
        leased = sum(nbytes for nbytes, _ in world.memory.leases.values())
        world.memory.budget = _MOST * free / world.local_size + leased


def lacking(memory: HostMemory, name: str, slots: int, nbytes: int) -> str:
    """Why there is no room for some slots any more; empty where they have their lease."""
    if memory.take(name, slots * nbytes, _ORDERS[name]):
        return ""
    return f"no room for {slots} slots of {nbytes / 1e6:.0f} MB in this host's memory, of which a rank has {memory}"


def release(memory: HostMemory) -> None:
    """Give everything back."""
    for name in _ORDERS:
        memory.give(name)


def free_memory(root: Path = Path("/")) -> float:
    """Bytes that are left to this process: of its host, and of its cgroups (v1 or v2); inf where nothing says.

    Caches of files count as left.
    """
    with suppress(OSError, KeyError):
        said = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        found = [each for _, kind, path in groups for each in _left(root / "sys/fs/cgroup", kind, path.strip("/"))]
        return max(0, min([int(said["MemAvailable"].split()[0]) * 1024, *found]))
    return math.inf


def _left(mount: Path, kind: str, path: str) -> Iterator[int]:
    """What a cgroup and those above it have left; a group that is not mounted here under its path is passed over."""
    folder = mount / kind / path
    for each in (folder, *folder.parents[: len(Path(path).parts)]) if kind in _FILES else ():
        limit, used, cache = _FILES[kind]
        with suppress(OSError, ValueError, KeyError):  # "max" is no number: no limit
            stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            yield int((each / limit).read_text()) - int((each / used).read_text()) + int(stat[cache])
