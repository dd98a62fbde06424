"""Limits the memory of a host that checkpoints take.

If memory runs short, copies held for other hosts are freed first, then the host's own slots. One copy of the state,
from which checkpoints are written to disk, is always allowed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring import figures
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import check_private
from shoestring.core.errors import ShoestringError
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World
from shoestring.planning.system import free_memory, kills_for_memory, peak_above_now
from shoestring.storage.guarded import read_regular

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered

STAGING, OWN, HELD = "checkpoint staging", "checkpoint memory", "checkpoint peers"
DIFFERENCES = "checkpoint differences"
_ALL = 1e18  # more bytes than any host has; JSON has no infinity
_PRIORITIES = {
    STAGING: Priority.REQUIRED,
    OWN: Priority.CHECKPOINT,
    DIFFERENCES: Priority.CHECKPOINT,
    HELD: Priority.PEERS,
}


def share(group: RankGroup, world: World, settings: Tiered, folder: Path) -> None:
    """Set a rank's budget of its host's memory: `max_memory_gb` if the user has set it, else most of the memory that is
    free at the peak of a step. A collective. Without `max_memory_gb`, a budget that is already set does not change.
    Slots of an earlier start of the run will be filled again, so their memory counts as free. If the system has killed
    a process for lack of memory since that start, checkpoints may take at most half of the memory that was free at that
    start.
    """
    if settings.max_memory_gb:
        world.memory.budget = settings.max_memory_gb * 1e9 / world.local_size
        return
    there = 0
    with suppress(OSError):
        there = sum(path.stat().st_blocks * 512 for path in folder.glob("*"))
    note = folder.parent / f"budget-{folder.name}.json"
    # The maximum of an earlier start still holds. If the system has killed a process for lack of memory since then, the
    # maximum is half of the memory that was free at that start.
    most, kills = _ALL, kills_for_memory()
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(read_regular(note, 1 << 16))
        most = float(before["free"]) / 2 if kills > before["kills"] else float(before["most"])
    host = world.rank // world.local_size * world.local_size
    answers = group.all_gather([min(free_memory() + there, _ALL), peak_above_now(), most])
    on_host = answers[host : host + world.local_size]
    # All ranks may reach their peaks at the same time.
    free = min(free for free, _, _ in on_host) - sum(above for _, above, _ in on_host)
    free = max(0.0, min([free, *(most for *_, most in on_host)]))
    world.memory.settle(free, world.local_size, there)
    if world.local_rank == 0:
        with suppress(OSError, ShoestringError):
            check_private(folder)
            note.write_text(json.dumps({"free": free, "most": most, "kills": kills}))


def lacking(memory: HostMemory, name: str, slots: int, nbytes: int) -> str:
    """Lease (reserve) memory for slots; returns an empty string, or the reason why there is no room.

    If there is no room, the caller must free the slots and return their lease.
    """
    if memory.take(name, slots * nbytes, _PRIORITIES[name]):
        return ""
    has = memory.described(but=name)
    return f"no room for {slots} slots of {figures.memory(nbytes)} in this host's memory, of which a rank has {has}"


def called_back(memory: HostMemory, name: str) -> str:
    """Return the reason why the caller must free slots now and return their lease; empty if no other process needs the
    memory."""
    if name not in memory.called_back:
        return ""
    nbytes = memory.leases[name][0] if name in memory.leases else 0
    return f"other processes on this host need the {figures.memory(nbytes)} of its slots"


def release(memory: HostMemory) -> None:
    """Return all leases of host memory that checkpoints hold."""
    for name in _PRIORITIES:
        memory.give(name)
