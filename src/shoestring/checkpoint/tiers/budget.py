"""What the levels take of a host's memory. Given back first is what is held for other hosts, then the own slots; one
copy to write to disk from is always taken."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import check_private
from shoestring.core.errors import ShoestringError
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World
from shoestring.planning.system import free_memory, kills_for_memory, peak_above_now

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered

STAGING, OWN, HELD = "checkpoint staging", "checkpoint memory", "checkpoint peers"
DIFFERENCES = "checkpoint differences"
_ALL = 1e18  # bytes: no host has as many
_PRIORITIES = {
    STAGING: Priority.REQUIRED,
    OWN: Priority.CHECKPOINT,
    DIFFERENCES: Priority.CHECKPOINT,
    HELD: Priority.PEERS,
}


def share(group: RankGroup, world: World, settings: Tiered, folder: Path) -> None:
    """Set a rank's part of its host's memory, unless it is set: what the user allows, or most of what is free at the
    peak of a step.

    What slots of an earlier start take will be filled again: it counts as if it were free. If something was killed for
    memory since that start, it may have taken too much: from now on the run takes half of it. A collective.
    """
    if settings.budget:
        world.memory.budget = settings.budget * 1e9 / world.local_size
        return
    there = 0
    with suppress(OSError):
        there = sum(path.stat().st_blocks * 512 for path in folder.glob("*"))
    note = folder.parent / f"budget-{folder.name}.json"
    most, kills = _allowed(note), kills_for_memory()
    host = world.rank // world.local_size * world.local_size
    told = group.all_gather([min(free_memory() + there, _ALL), peak_above_now(), most])[host : host + world.local_size]
    free = min(free for free, _, _ in told) - sum(above for _, above, _ in told)
    free = max(0.0, min([free, *(most for *_, most in told)]))
    world.memory.settle(free, world.local_size, there)
    if world.local_rank == 0:
        with suppress(OSError, ShoestringError):
            check_private(folder)
            note.write_text(json.dumps({"free": free, "most": most, "kills": kills}))


def _allowed(note: Path) -> float:
    """Bytes that all ranks of this host may take at most, for what happened to earlier starts of the run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(note.read_bytes())
        return float(before["free"]) / 2 if kills_for_memory() > before["kills"] else float(before["most"])
    return _ALL


def lacking(memory: HostMemory, name: str, slots: int, nbytes: int) -> str:
    """Why there is no room for some slots any more, which must be freed, and then given; empty where there is."""
    if memory.take(name, slots * nbytes, _PRIORITIES[name]):
        return ""
    has = memory.described(but=name)
    return f"no room for {slots} slots of {nbytes / 1e6:.0f} MB in this host's memory, of which a rank has {has}"


def called_back(memory: HostMemory, name: str) -> str:
    """Why slots must be freed now, and then given; empty where nobody needs them."""
    if name not in memory.called_back:
        return ""
    nbytes = memory.leases[name][0] if name in memory.leases else 0
    return f"others on this host need the {nbytes / 1e6:.0f} MB of its slots"


def release(memory: HostMemory) -> None:
    """Give everything back."""
    for name in _PRIORITIES:
        memory.give(name)
