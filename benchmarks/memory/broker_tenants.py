"""The four kinds of processes of the broker's benchmark: `python -m benchmarks.memory.broker_tenants JSON`.

Each runs inside of a cgroup until its standard input is closed, and then prints a JSON line of what it has done. All
that it holds is touched. Work is counted for each CPU second, so that other load on the machine does not count.
"""

from __future__ import annotations

import json
import mmap
import select
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.leases import HostMemory, Priority
from shoestring.memory.broker.tenant import BrokeredMemory, Terms

MB = 1 << 20
CHUNK = 4 * MB  # of a cache
POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14
READS = 3  # blocks that a step reads
PAUSE = 0.03  # seconds between two steps, in which others compute
AGAIN = 0.05  # seconds between two tries to cache more
EVALUATION = 1.5, 0.5  # seconds between evaluations, and seconds of one, for which more is needed


def touched(nbytes: int) -> mmap.mmap:
    """Memory that is there, and gone when it is closed."""
    memory = mmap.mmap(-1, nbytes)
    try:
        memory.madvise(POPULATE)
    except OSError:
        for page in range(0, nbytes, mmap.PAGESIZE):
            memory[page] = 1
    return memory


def open_memory(how: dict[str, Any]) -> HostMemory:
    """This process's host memory: brokered, or its part of a fixed partition."""
    (Path(how["group"]) / "cgroup.procs").write_text("0")
    if how["folder"] is None:
        return HostMemory()
    memory = BrokeredMemory(terms=Terms(Path(how["folder"]), tenant=how["kind"], reserve=0.05))
    memory.join()
    return memory


def stopped() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


@dataclass
class Cache:
    """Blocks that are quick to read where they are cached, and take five times as long where they are not."""

    memory: HostMemory
    blocks: int
    allowed: int
    """How many a fixed partition lets it keep."""
    kept: dict[int, mmap.mmap] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    tried: float = 0.0

    def read(self, block: int) -> None:
        with self.lock:
            if (cached := self.kept.get(block)) is not None:
                zlib.crc32(cached)
                return
        made = bytes(CHUNK)
        for _ in range(5):
            zlib.crc32(made)
        del made
        if len(self.kept) < self.allowed and time.monotonic() - self.tried > AGAIN:
            self.tried = time.monotonic()
            self.keep(block)

    def keep(self, block: int) -> None:
        name = f"block {block}"
        if self.memory.take(name, CHUNK, Priority.CACHE):
            with self.lock:
                self.kept[block] = touched(CHUNK)
            if isinstance(self.memory, BrokeredMemory):
                self.memory.when_called(name, lambda: self.drop(block))

    def drop(self, block: int) -> None:
        with self.lock:
            if cached := self.kept.pop(block, None):
                cached.close()
        self.memory.give(f"block {block}")


def offloading(memory: HostMemory, how: dict[str, Any]) -> dict[str, Any]:
    """A training with state on the host, which needs more for its evaluations, and a cache of its data."""
    refused = not memory.take("optimizer state", how["state"])
    state, cache = touched(how["state"]), Cache(memory, how["blocks"], how["allowed"])
    steps, more, since = 0, None, time.monotonic()
    began = time.process_time()
    while not stopped():
        if more is None and time.monotonic() - since > EVALUATION[0]:
            refused |= not memory.take("evaluation", how["more"])
            more, since = touched(how["more"]), time.monotonic()
        elif more is not None and time.monotonic() - since > EVALUATION[1]:
            more.close()
            memory.give("evaluation")
            more, since = None, time.monotonic()
        place = steps * CHUNK % (how["state"] - CHUNK)
        state[place : place + CHUNK] = state[-CHUNK:]
        for number in range(READS):
            cache.read((READS * steps + number) % how["blocks"])
        steps += 1
        time.sleep(PAUSE)
    return {"steps": steps, "cpu": time.process_time() - began, "refused": refused, "cached": len(cache.kept)}


def checkpointing(memory: HostMemory, how: dict[str, Any]) -> dict[str, Any]:
    """A training with checkpoints in this host's memory and on disk."""
    import torch

    from shoestring.checkpoint import Tiered
    from shoestring.checkpoint.tiers.file_acts import Files
    from shoestring.checkpoint.tiers.slots import slots_folder
    from shoestring.checkpoint.tiers.tiered import Checkpointer
    from shoestring.core.kept import Kept, Progress
    from shoestring.core.world import World
    from tests.rigs.checkpointing.known import KnownState

    with tempfile.TemporaryDirectory(dir=how["root"]) as slots, tempfile.TemporaryDirectory() as disk:
        weights = torch.ones(how["state"], dtype=torch.uint8)
        state, progress = KnownState(lambda _: {"bytes": weights}), Progress()
        state.content = state.make(0)
        world = World(memory=memory)
        budget = 1000.0 if how["allowed"] else 1e-6  # GB
        settings = Tiered(
            folder=disk,
            memory_folder=slots,
            memory_every=4,
            disk_every=60,
            redundancy="off",
            keep=1,
            max_memory_gb=budget,
        )
        kept = {"mine": Kept(state, "own", None), "progress": Kept(progress, "same", None)}
        folder = slots_folder(settings, world)
        checkpointer = Checkpointer(kept, progress, world, settings, folder, set, Files())
        began = time.process_time()
        while not stopped():
            progress.step += 1
            for _ in range(5):
                zlib.crc32(weights.numpy().data[: 4 * CHUNK])
            checkpointer.wait()
            checkpointer.capture(False)
            time.sleep(PAUSE)
        checkpointer.drain()
        found = {"steps": progress.step, "cpu": time.process_time() - began, "safe": dict(checkpointer.safe)}
        checkpointer.close()
    return found | {"refused": False}


def killed(memory: HostMemory, how: dict[str, Any]) -> dict[str, Any]:
    """A job that comes, takes what it can get, and is killed."""
    refused = not memory.take("state", how["state"])
    state, cache = touched(how["state"]), Cache(memory, how["blocks"], how["allowed"])
    for block in range(min(how["blocks"], how["allowed"])):
        cache.keep(block)
    print(json.dumps({"refused": refused}), flush=True)
    while not stopped():
        time.sleep(PAUSE)
    state.close()
    return {"refused": refused}


KINDS: dict[str, Callable[[HostMemory, dict[str, Any]], dict[str, Any]]] = {
    "offloading": offloading,
    "checkpointing": checkpointing,
    "killed": killed,
}


if __name__ == "__main__":
    setting = json.loads(sys.argv[1])
    if setting["kind"] == "checkpointing":
        import tests.rigs.checkpointing.known  # noqa: F401  (before the limit: files of libraries are nobody's)
    host = open_memory(setting)
    print("ready", flush=True)
    print(json.dumps(KINDS[setting["kind"]](host, setting)), flush=True)
