"""How long a checkpoint stops training for, against the time that a copy of the same bytes takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.optim import AdamW

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.intervals import of_mean, of_median
from shoestring.checkpoint import Tiered
from shoestring.checkpoint.tiers.staging import Copies
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from tests.rigs.checkpointing.trainee import fresh

WIDTH, LAYERS = 1024, 12  # 50 MB of weights, 151 MB of state
RUNS = 7
MANY = 290  # layers with as many parameter tensors as GPT2-XL has, 580
Save = Callable[[int], float]
"""Saves once more, of a number that grows, and says for how many seconds it stopped its caller."""
Peer = Callable[[Path, Job], AbstractContextManager[Save]]


def job_of(folder: Path, *, overlap: bool, width: int = WIDTH, layers: int = LAYERS, every: int = 3) -> Job:
    """A job with a checkpoint to memory after every few steps; without one if `every` is 0."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    settings = {"memory_every": every, "peers_every": 0, "disk_every": 0, "overlap": overlap}
    tiered = Tiered(folder=str(folder / "saves"), memory_folder=str(folder / "memory"), **settings)
    optimizer = partial(AdamW, lr=1e-4, fused=True)
    return compose(Job(model, loss=_loss, optimizer=optimizer, world=World()), [tiered])


def _loss(output: torch.Tensor, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
    return output.square().sum(), torch.tensor(output.numel())


def measured(folder: Path, saves: int = 15, *, overlap: bool = True) -> dict[str, float]:
    """Medians over checkpoints: {"stall", "copy"} in seconds, alternating in one run, and the "bytes" of both.

    `folder` should be in memory, as slots are. The copy is of as many tensors of the same sizes, between places that
    were used before.
    """
    stalls, seconds = [], []
    with job_of(fresh(folder), overlap=overlap) as job:
        batch = (torch.randn(64, WIDTH),)
        tensors = [p.detach() for p in attachments_of(job).module.parameters() for _ in range(3)]
        copies = Copies([torch.empty_like(tensor) for tensor in tensors], [tensor.clone() for tensor in tensors])
        for _ in range(9):  # each slot is filled once, and its pages are there
            job.step(batch)
        for _ in range(saves):
            stall, copied = job.trace.facts["checkpoint_stall"], job.trace.facts["checkpoint_bytes"]
            for _ in range(3):
                job.step(batch)
            time.sleep(0.2)  # what was saved has been copied, at its bounded rate, and sealed
            began = time.perf_counter()
            copies.do()
            seconds.append(time.perf_counter() - began)
            if job.trace.facts["checkpoint_bytes"] > copied:
                stalls.append(job.trace.facts["checkpoint_stall"] - stall)
        nbytes = float(sum(tensor.nbytes for tensor in tensors))
    return {"stall": median(stalls), "copy": median(seconds), "bytes": nbytes, "saves": float(len(stalls))}


def of_many(folder: Path, saves: int = 40) -> list[float]:
    """Seconds for which each checkpoint of MANY small layers stops training: its cost beside that of its bytes."""
    stalls = []
    with job_of(fresh(folder), overlap=True, width=16, layers=MANY) as job:
        batch = (torch.randn(4, 16),)
        for number in range(9 + 3 * saves):
            if number == 9:
                gc.collect()  # what was imported until then must not be looked through during a checkpoint
            before = job.trace.facts.get("checkpoint_stall", 0.0)
            job.step(batch)
            if number >= 9 and (stall := job.trace.facts["checkpoint_stall"] - before):
                stalls.append(stall)
    return stalls


@contextmanager
def dcp(folder: Path, job: Job) -> Iterator[Save]:
    """torch's `async_save` of the job's state; what it does after it returns is waited for."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)

    def save(number: int) -> float:
        state = {"model": attachments_of(job).module.state_dict(), "optimizer": job.optimizer.state_dict()}
        began = time.perf_counter()
        under_way = async_save(state, checkpoint_id=str(fresh(folder / f"dcp-{number % 2}")))
        seconds = time.perf_counter() - began
        assert isinstance(under_way, Future)
        under_way.result()
        return seconds

    try:
        yield save
    finally:
        dist.destroy_process_group()


@contextmanager
def dcp_process(folder: Path, job: Job) -> Iterator[Save]:
    """torch's `async_save` with the options that stop training the least on a CPU: copies are staged into the same
    shared memory every time, and a process of its own writes them."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)

    def save(number: int) -> float:
        state = {"model": attachments_of(job).module.state_dict(), "optimizer": job.optimizer.state_dict()}
        began = time.perf_counter()
        under_way: Any = async_save(
            state, checkpoint_id=str(fresh(folder / f"dcp-{number % 2}")), async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        getattr(under_way, "upload_completion", under_way).result()
        return seconds

    try:
        for warming in (1, 2, 3):  # the process is there, and the pages of both folders and of the stage
            save(warming)
        yield save
    finally:
        dist.destroy_process_group()
        stager.close()


@contextmanager
def lm_resiliency(folder: Path, job: Job) -> Iterator[Save]:
    """PyPI's lm-resiliency, as its own hooks call it: to this process's memory, waited for before the next step.

    Raises:
        ImportError: it is not installed.
    """
    config: Any = import_module("lm_resiliency").InMemoryCkptConfig
    manager: Any = import_module("lm_resiliency.checkpointing.manager").InMemoryCheckpointManager(
        config(disk_flush_interval=0, disk_folder=str(folder / "disk"), run_id="stall", pin_memory=False)
    )
    states = job.optimizer.state.values()
    tensors = [*attachments_of(job).module.parameters(), *(each for state in states for each in state.values())]

    def save(number: int) -> float:
        began = time.perf_counter()
        manager.save_tensors(tensors, number)
        manager.maybe_wait()
        return time.perf_counter() - began

    try:
        for warming in (1, 2, 3):  # both of its slots are filled once, and their pages are there
            save(warming)
        yield save
    finally:
        manager.close()


def against(peer: Peer, folder: Path, saves: int = 15) -> tuple[list[float], list[float]]:
    """Seconds for which checkpoints of ours and of a peer stop training, in turns, of the same state."""
    ours, theirs = [], []
    with job_of(folder / "ours", overlap=True) as job:
        batch = (torch.randn(64, WIDTH),)
        for _ in range(9):
            job.step(batch)
        with peer(folder, job) as save:
            for number in range(saves):
                stall = job.trace.facts["checkpoint_stall"]
                for _ in range(3):
                    job.step(batch)
                ours.append(job.trace.facts["checkpoint_stall"] - stall)
                time.sleep(0.1)
                theirs.append(save(4 + number))
    return ours, theirs


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""

    def turns(_: Deadline, peer: Peer, package: str) -> Measured | NotRun:
        if find_spec(package) is None:
            return NotRun(f"{package} is not installed")
        with TemporaryDirectory(dir="/dev/shm") as folder:
            ours, theirs = against(peer, Path(folder))
        told = f"{1e3 * median(ours):.1f} ms, and {1e3 * median(theirs):.1f} ms for the other"
        return of_median([one / other for one, other in zip(ours, theirs, strict=True)], told)

    def stall(_: Deadline, *, overlap: bool) -> Measured:
        with TemporaryDirectory(dir="/dev/shm") as folder:  # where memory lies makes a copy take 4 to 11 ms
            every = [measured(Path(folder) / f"stall-{number}", overlap=overlap) for number in range(RUNS)]
        ratios = sorted(each["stall"] / each["copy"] for each in every)
        stalls, copies = ([1e3 * each[name] for each in every] for name in ("stall", "copy"))
        told = (
            f"median of {RUNS} runs ({ratios[0]:.2f} to {ratios[-1]:.2f}), each of {every[0]['saves']:.0f} checkpoints "
            f"of {every[0]['bytes'] / 1e6:.0f} MB: stopped for {min(stalls):.1f} to {max(stalls):.1f} ms, copies of as "
            f"much take {min(copies):.1f} to {max(copies):.1f} ms"
        )
        return of_median(ratios, told)

    def many(_: Deadline) -> Measured:
        with TemporaryDirectory(dir="/dev/shm") as folder:
            stalls = of_many(Path(folder) / "many")
        told = f"of {len(stalls)} checkpoints of {8 * MANY} tensors; the median is {1e3 * median(stalls):.1f} ms"
        return of_mean([1e3 * stall for stall in stalls], told)

    what = (
        "time for which a checkpoint to memory stops training, over that of a copy of the same tensors in the same run"
    )
    over = "time for which a checkpoint stops training, over that of {peer} of the same state, in turns in one run"
    peers = (
        ("dcp", "torch DCP's async_save", dcp, "torch", "torch.distributed.checkpoint.async_save"),
        (
            "dcp-process",
            "torch DCP's async_save with cached staging and a process of its own",
            dcp_process,
            "torch",
            "torch.distributed.checkpoint.async_save, DefaultStager, AsyncCheckpointerType.PROCESS",
        ),
        ("lm-resiliency", "lm-resiliency's save to memory", lm_resiliency, "lm_resiliency", "lm-resiliency 0.2.0"),
    )
    return [
        *(
            Bar(
                f"checkpoint.stall-{id}",
                over.format(peer=said),
                "<=",
                1.0,
                partial(turns, peer=peer, package=package),
                baseline=baseline,
            )
            for id, said, peer, package, baseline in peers
        ),
        Bar("checkpoint.stall", f"{what}; copied beside the next step", "<=", 1.25, partial(stall, overlap=True)),
        Bar(
            "checkpoint.stall-many",
            "mean milliseconds for which a checkpoint to memory stops training that has next to no bytes but as many "
            "tensors as GPT2-XL's state: the part that does not depend on bytes",
            "<=",
            10.0,
            many,
        ),
        Bar("checkpoint.stall-plain", f"{what}; copied at once", "<=", 1.25, partial(stall, overlap=False)),
    ]
