"""What the ranks do in the tests of what they decide together: states of several chunks, and hosts that are lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers import rank_group as circle_module
from shoestring.checkpoint.tiers.budget import HELD
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import Slot, seals
from shoestring.memory.broker.tenant import BrokeredMemory, Terms
from shoestring.testing.scenarios import here
from tests.rigs.checkpointing.known import RunSetup, Trainee
from tests.rigs.checkpointing.surroundings import listening

CHUNKS = 9 << 20  # bytes of each rank's own state: three chunks


def large(rank: int, step: int) -> dict[str, Any]:
    return {"bytes": torch.full((CHUNKS,), 16 * rank + step, dtype=torch.uint8)}


def damaged(*, folder: str, at: int) -> list[Any]:
    """What each rank restores where one file of the newest checkpoint is damaged, which only one rank reads."""
    setting = RunSetup(folder=folder, ranks=2, local=2, disk_every=2)
    trainee = Trainee.of(setting)
    rank = trainee.checkpointer.world.rank
    trainee.states["mine"].make = lambda step: large(rank, step)
    trainee.train(4)
    trainee.checkpointer.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(setting.memory(0))
        (path,) = setting.disk(0).glob("step-00000004-*/private-1.safetensors")
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    again = Trainee.of(setting)
    again.states["mine"].make = lambda step: large(rank, step)
    found = again.restored()
    again.checkpointer.close()
    return [*found]


def outlived(*, folder: str) -> dict[str, Any]:
    """The steps in a rank's own slots when the peers' copies are some steps old; and what a lost host costs."""
    setting = RunSetup(folder=folder, ranks=2, peers_every=4, disk_every=100)
    trainee = Trainee.of(setting)
    trainee.train(7)
    folder_of_slots = trainee.checkpointer.folder
    trainee.checkpointer.close()
    own = sorted(r.checkpoint.step for path, r in seals(folder_of_slots) if path.name.startswith("own-"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(setting.memory(1))
    dist.barrier()
    again = Trainee.of(setting)
    found = again.restored()
    again.checkpointer.close()
    return {"own": own, "restored": [*found]}


def miscopied(*, folder: str, parity: bool) -> list[Any]:
    """What a run says and counts as safe at peers when rank 1 got one bit that rank 0 did not send; and later."""
    rank = dist.get_rank()
    trainee = Trainee.of(RunSetup(folder=folder, ranks=2, peers="parity" if parity else "copy", disk_every=100))
    swap, flips = RankGroup.exchange, [rank == 1]

    def flipping(group: RankGroup, sends: Any, receives: Any) -> Any:
        found = swap(group, sends, receives)
        if flips and flips.pop():
            receives[0][1][1] ^= 1
            return found | {0} if parity else found  # parity compares what arrives, a copy what lies there at last
        return found

    with listening() as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "exchange", flipping)
        trainee.train(3)
        first = {**trainee.checkpointer.safe}
        for step in (4, 5):
            trainee.at(step)
            trainee.checkpointer.wait()
            trainee.checkpointer.capture(False)
            trainee.checkpointer.drain()
    later = trainee.checkpointer.safe["peers"]
    trainee.checkpointer.close()
    return [first["peers"], later, said]


def called_back(*, folder: str) -> dict[str, Any]:
    """What each rank holds for the other before rank 1 needs all memory, at the next step, and at the next copy."""
    trainee = Trainee.of(RunSetup(folder=folder, ranks=2, peers_every=4, disk_every=100))
    memory = BrokeredMemory(terms=Terms(Path(folder) / "user" / "broker", wait=0.0))
    checkpointer = trainee.checkpointer
    checkpointer.world = checkpointer.keeper.world = replace(checkpointer.world, memory=memory)
    memory.join(watch=False)

    def step(number: int) -> list[Any]:
        dist.barrier()
        memory.look()
        trainee.at(number)
        checkpointer.wait()
        checkpointer.capture(False)
        checkpointer.drain()
        kept = sum(path.stat().st_blocks for path in checkpointer.folder.glob("held-*"))
        return [HELD in memory.leases, kept > 0, checkpointer.safe["peers"]]

    with listening() as said:
        for number in range(1, 5):
            before = step(number)
        if dist.get_rank() == 1:
            memory.take("offload", 1 << 50)
        after, refused = step(5), [step(number) for number in range(6, 9)][-1]
    checkpointer.close()
    memory.leave()
    return {"before": before, "after": after, "refused": refused, "said": said}


def copied(*, folder: str) -> str:
    """What a copy raises on each rank when only one holds something else than was sent."""
    world = here()
    group = RankGroup.join(world)
    slot, swap = Slot(Path(folder) / f"held-{world.rank}", Files()), RankGroup.exchange

    def flipping(group: RankGroup, sends: Any, receives: Any) -> Any:
        found = swap(group, sends, receives)
        receives[0][1][5] ^= group.rank
        return found

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankGroup, "exchange", flipping)
            part = torch.arange(100, dtype=torch.uint8)
            peer_copies.copy(group, 1, part, slot, CheckpointId(1, 0, "ab", 2, 1))
        return ""
    except ConnectionError as error:
        return str(error)
    finally:
        group.close()


def abandoned() -> dict[str, str]:
    """What rank 0 is told when rank 1 does not come to an exchange, of each kind."""
    data = torch.zeros(64 << 20, dtype=torch.uint8)  # more than a socket's buffers take
    exchanges: dict[str, Callable[[RankGroup], Any]] = {
        "tell": lambda group: group.all_gather("here"),
        "least": lambda group: group.all_reduce_min([1.0]).wait(),
        "receive": lambda group: group.exchange([], [(1, data)]),
        "send": lambda group: group.exchange([(1, data)], []),
    }
    said = {}
    for name, exchange in exchanges.items():
        dist.barrier()  # so that joining takes no longer, either
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(circle_module, "timeout_of", lambda _: timedelta(seconds=2))
            group = RankGroup.join(here(), "writing a checkpoint")
        if group.rank == 0:
            try:
                exchange(group)
                said[name] = ""
            except RuntimeError as error:
                said[name] = str(error)
        dist.barrier()
        group.close()
    return said
