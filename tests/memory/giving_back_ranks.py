"""Ranks whose host's memory others need: what they hold for each other goes first."""

import os
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from broker_hosts import Pretended

from shoestring.checkpoint.tiers.budget import HELD, OWN
from shoestring.checkpoint.tiers.keeper import Keeper
from shoestring.core.leases import HostMemory
from tests.rigs.checkpointing.known import RunSetup, Trainee

FAULTS = {
    "": None,
    "nobody answers": (Keeper, "answer_calls", lambda self: None),
    "the files stay": (Keeper, "_free_held", lambda self: self.world.memory.give(HELD)),
    "the lease stays": (Keeper, "_free_held", lambda self: [slot.close("") for slot in self.held]),
}


def peers_slots(folder, fault=""):
    """Bytes leased for other hosts and for own slots, and files held for others: before others need memory and after;
    and the newest checkpoints that are safe on peers and on disk at the end."""
    planted = FAULTS[fault]
    if planted:
        owner, name, changed = planted
        before = getattr(owner, name)
        setattr(owner, name, changed)
    try:
        return _given_back(Path(folder))
    finally:
        if planted:
            setattr(owner, name, before)


def _given_back(folder):
    rank = dist.get_rank()
    host = Pretended(folder / f"host-{rank}" / "broker", total=1 << 30)
    memory, other = host.tenant("run"), host.tenant("other")
    run = Trainee.of(RunSetup(folder=str(folder), ranks=2, peers_every=2, disk_every=4))
    run.checkpointer.world = replace(run.checkpointer.world, memory=memory)
    run.checkpointer.keeper.world = run.checkpointer.world
    run.train(2)

    def seen():
        files = [path for path in run.checkpointer.folder.glob("held-*") if path.stat().st_blocks]
        leases = {name: taken for name, (taken, _) in memory.leases.items()}
        return leases.get(HELD, 0), leases.get(OWN, 0), len(files)

    at_first = seen()
    assert isinstance(memory, HostMemory) and at_first[0], f"process {os.getpid()} holds nothing for others"
    other.take("offload", host.total - sum(at_first[:2]) + at_first[0] // 2)
    memory.look()
    run.at(3)
    run.checkpointer.wait()
    run.checkpointer.capture(False)
    run.checkpointer.drain()
    found = at_first, seen(), dict(run.checkpointer.safe), sorted(memory.called_back)
    run.checkpointer.close()
    memory.leave()
    other.leave()
    return found
