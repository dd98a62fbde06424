"""A lost host's state had again from what others keep of it: how fast, over plain sends of as many bytes.

As a program, `python -m benchmarks.checkpoint.restore PHASE HOW OUT` is one rank under torchrun: it saves, or restores.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.intervals import of_median
from shoestring.checkpoint import Tiered
from shoestring.checkpoint.attached import Attached
from shoestring.checkpoint.recovery.decide import ResumeFacts, ResumePlan, decide
from shoestring.checkpoint.recovery.offers import Wish, gather
from shoestring.checkpoint.recovery.verify import Unusable, verify
from shoestring.checkpoint.tiers.keeper import REBUILT
from shoestring.checkpoint.tiers.peer_copies import ParitySet, partner
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.world import World
from shoestring.testing.netlab import SHARED, netlab, netlab_available
from tests.rigs.lab_run import environment

HOSTS, LOST, RATE = 4, 2, "1gbit"
TENSORS, LENGTH = 20, 1 << 20  # of float32: 84 MB a rank
ROUNDS = 9
PATIENCE = 240.0  # seconds


class Mass:
    """What each rank has for itself."""

    def __init__(self, rank: int) -> None:
        self.tensors = {f"{n}": torch.full((LENGTH,), rank + n / 100) + torch.arange(LENGTH) for n in range(TENSORS)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.tensors = dict(state_dict)


def attached(mass: Mass, how: str, out: Path) -> Attached:
    settings: dict[str, Any] = {"memory_every": 1, "peers_every": 1, "disk_every": 0, "peers": how}
    return Attached({}, {"mass": mass}, Tiered(folder=str(out / "saves"), **settings))


def save(how: str, out: Path) -> None:
    """Leave a state in memory, here and on peers."""
    with attached(Mass(dist.get_rank()), how, out) as cache:
        for _ in range(4):
            cache.step()
            cache.checkpointer.drain()
        if not cache.checkpointer.safe["peers"]:
            raise RuntimeError("nothing is safe on peers")


def restore(how: str, out: Path) -> None:
    """Have it again, and send as many bytes plainly, in turns; the seconds of each land in `out`."""
    mass = Mass(dist.get_rank())
    with attached(Mass(0), how, out) as cache:
        checkpointer = cache.checkpointer
        checkpointer.take()
        world, wish = checkpointer.world, Wish(out / "saves", checkpointer.folder.parent)
        found = gather(world, checkpointer.group, wish)
        chosen = decide(found, checkpointer.claim.known, wish, ResumeFacts(world.hosts, world.local_size))
        nbytes = next(o.entry.nbytes for o in chosen.offers if o.part == f"private-{(LOST + 1) % HOSTS}")
        plain = PlainTransfer(world, plan(how, nbytes))
        ours, theirs = [], []
        for _ in range(ROUNDS):
            theirs.append(seconds(plain.send))
            ours.append(seconds(partial(again, checkpointer, chosen, mass)))
            Slot(checkpointer.folder / f"{REBUILT}{LOST}", checkpointer.files).close()
        if dist.get_rank() == 0:
            (out / "seconds.json").write_text(json.dumps([ours, theirs, nbytes]))


def again(checkpointer: Checkpointer, chosen: ResumePlan, expected: Mass) -> Callable[[], None]:
    """Fetch and verify everything that this rank needs; what is to be checked of it afterwards.

    Raises:
        RuntimeError: it is damaged.
    """
    wanted = verify(chosen, {}, checkpointer)
    if isinstance(wanted, Unusable):
        raise RuntimeError("what peers keep is damaged")
    states = {name: wanted.state(name) for name in checkpointer.kept}

    def check() -> None:
        found = states["mass"]
        assert found is not None
        if not all(torch.equal(found[name], tensor) for name, tensor in expected.tensors.items()):
            raise RuntimeError("what was restored is not what was saved")

    return check


def seconds(work: Callable[[], Callable[[], None] | None]) -> float:
    """Seconds from where all ranks begin to where the last one is done."""
    dist.barrier()
    began = time.perf_counter()
    check = work()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    if check is not None:
        check()
    return float(taken)


def plan(how: str, nbytes: int) -> list[tuple[int, int, int]]:
    """(from, to, bytes): what must travel so that the lost rank has its part again."""
    if how == "copy":
        return [(partner(LOST, HOSTS), LOST, nbytes)]
    left = [rank for rank in range(HOSTS) if rank != LOST]
    segment = ParitySet(tuple(range(HOSTS)), (nbytes,) * HOSTS, (0,) * HOSTS).segment
    return [(source, target, segment) for source in left for target in (*left, LOST) if source != target]


class PlainTransfer:
    """Those bytes sent by gloo, all at once, between tensors that were used before."""

    def __init__(self, world: World, sends: list[tuple[int, int, int]]) -> None:
        def rooms(own: int, other: int) -> list[tuple[int, Tensor]]:
            return [
                (transfer[other], torch.ones(transfer[2], dtype=torch.uint8))
                for transfer in sends
                if transfer[own] == world.rank
            ]

        self.outgoing, self.incoming = rooms(0, 1), rooms(1, 0)

    def send(self) -> None:
        works = [dist.irecv(room, rank) for rank, room in self.incoming]
        works += [dist.isend(data, rank) for rank, data in self.outgoing]
        for work in works:
            assert work is not None
            work.wait()


def rank(phase: str, how: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"save": save, "restore": restore}[phase](how, Path(out))
    dist.barrier()
    dist.destroy_process_group()


def measured(how: str) -> tuple[list[float], list[float], int]:
    """Seconds of each restore, of each plain send, and the bytes of the lost part."""
    with TemporaryDirectory() as folder, netlab(hosts=HOSTS, rate=RATE, shared=Path(folder)) as lab:
        for phase in ("save", "restore"):
            script = ["-m", "benchmarks.checkpoint.restore", phase, how, str(SHARED)]
            lab.torchrun(script, env=environment()).check(PATIENCE)
            lab.remove(LOST)
            lab.add(LOST)
        return json.loads((Path(folder) / "seconds.json").read_text())


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""

    def rate(_: Deadline, how: str) -> Measured | NotRun:
        if reason := netlab_available():
            return NotRun(reason)
        ours, theirs, nbytes = measured(how)
        ratios = [plain / mine for mine, plain in zip(ours, theirs, strict=True)]
        speeds = [nbytes / median(each) / 1e6 for each in (ours, theirs)]
        told = f"medians of {len(ratios)}: {nbytes / 1e6:.0f} MB at {speeds[0]:.0f} MB/s, plainly at {speeds[1]:.0f}"
        return of_median(ratios, told)

    what = (
        "a host of four on links of 1 Gbit/s is lost with its memory and replaced: rate at which its state is there "
        "again, verified, {how}, over that of the same bytes sent plainly by gloo at once, in the same run"
    )
    told = {"copy": "from its partner", "parity": "rebuilt from parity"}
    return [
        Bar(f"checkpoint.restore-{how}", what.format(how=words), ">=", 0.7, partial(rate, how=how))
        for how, words in told.items()
    ]


if __name__ == "__main__":
    rank(*sys.argv[1:])
