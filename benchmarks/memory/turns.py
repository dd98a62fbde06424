"""What turns at copying do for a training with offloaded state beside a job that copies checkpoints in memory.

`python -m benchmarks.memory.turns FOLDER` is that job: it copies as the checkpoint tiers do, until its standard input
is closed, and prints the bytes of each second. It always copies; in the comparison it takes turns or does not.
"""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.harness import Bar, Deadline, Measured
from shoestring.checkpoint.tiers.staging import BATCH, PATIENCE
from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World
from shoestring.memory import Broker, Offload
from shoestring.memory.broker.tenant import BrokeredMemory, Terms
from shoestring.models.gpt import tiny
from shoestring.optim import AdamW

BYTES = 1 << 28  # that are copied, from one end to the other
STEPS, ROUNDS = 12, 8
LIMIT = 30.0  # seconds for what takes one


def copies(folder: str) -> None:
    """Copy until the standard input is closed."""
    torch.set_num_threads(1)
    memory = BrokeredMemory(terms=Terms(Path(folder))) if folder else HostMemory()
    if isinstance(memory, BrokeredMemory):
        memory.join()
    source = torch.ones(BYTES, dtype=torch.uint8)
    target = torch.ones(BYTES, dtype=torch.uint8)
    print("ready", flush=True)
    began, copied = time.perf_counter(), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for each, other in zip(target.split(BATCH), source.split(BATCH), strict=True):
            with memory.turn(Priority.CHECKPOINT, PATIENCE):
                each.copy_(other)
            copied += each.nbytes
    print(copied / (time.perf_counter() - began), flush=True)


@contextmanager
def neighbour(folder: str, rates: list[float]) -> Iterator[None]:
    """The other job; what it has copied a second is appended to `rates`."""
    command = [sys.executable, "-m", "benchmarks.memory.turns", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], LIMIT)[0]:
            raise TimeoutError("the neighbour did not start")
        process.stdout.readline()
        yield
        process.stdin.close()
        rates.append(float(process.stdout.read()))
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def steps(_: Deadline) -> Measured:
    """Time of a step with turns over that without, and what the neighbour copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other core is the neighbour's
    torch.manual_seed(0)
    tokens = torch.randint(2048, (2, 257))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    times: dict[bool, list[float]] = {True: [], False: []}
    rates: dict[bool, list[float]] = {True: [], False: []}
    alone: list[float] = []
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            features = [Broker(folder=place), Offload(), AdamW(lr=1e-4)]
            with compose(Job(tiny(), world=World()), features) as job:
                folder = str(Broker(folder=place).place)
                for _round in range(ROUNDS):
                    _timed(job, batch, alone)
                    for turns in (True, False):
                        with neighbour(folder if turns else "", rates[turns]):
                            _timed(job, batch, times[turns])
    finally:
        torch.set_num_threads(threads)
    by_themselves = statistics.median(alone)
    found = {turns: statistics.median(each) for turns, each in times.items()}
    copied = {turns: statistics.median(each) / 1e9 for turns, each in rates.items()}
    return Measured(
        found[True] / found[False],
        f"a step takes {1e3 * by_themselves:.0f} ms alone, {1e3 * found[True]:.0f} with turns and"
        f" {1e3 * found[False]:.0f} without; the neighbour copies {copied[True]:.2f} and {copied[False]:.2f} GB/s;"
        f" medians of {ROUNDS * STEPS} steps",
    )


def _timed(job: Job, batch: dict[str, torch.Tensor], times: list[float]) -> None:
    job.step(batch)
    for _ in range(STEPS):
        began = time.perf_counter()
        job.step(batch)
        times.append(time.perf_counter() - began)


def rows() -> list[Bar]:
    said = "time of a step with offloaded state beside a job that copies checkpoints, taking turns, over without turns"
    return [Bar("memory.broker-turns", said, "<=", 1.0, steps)]


if __name__ == "__main__":
    copies(sys.argv[1])
