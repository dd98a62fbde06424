"""A small run that is killed again and again: what a rank does, and how ranks are forked, killed and started again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from shoestring.checkpoint import Tiered, attached
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.comm import PowerSGD, Quantize, Transport
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.trace import Kind, Trace
from shoestring.core.world import World
from shoestring.parallel import DDP, FSDP
from shoestring.testing import jobs
from shoestring.testing.fork_server import ForkedProcess

PATIENCE = 60.0  # seconds for one start of a run
ROW = 1024  # weights
GATE = "gate"
REPLAYED = "differences"
"""Replicas whose steps since the newest checkpoint are kept, and replayed."""


@dataclass(frozen=True, kw_only=True)
class FaultyRun:
    """A run, and the fault in one of its starts."""

    folder: str
    ranks: int = 2
    local: int = 1
    """Ranks of a host."""
    steps: int = 12
    under: str = "ddp"
    """Of what kind it is: "ddp" with residuals, "fsdp", or REPLAYED."""
    mass: int = 0
    """Bytes of state that each rank holds besides that of the tiny model, rounded up to some kilobytes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    victim: int = -1
    point: str = ""
    """The named point at which the victim kills itself: an act on files, or the end of a span; empty: none."""
    count: int = 1
    """How often the point is passed before."""
    start: int = 0
    """Number of the start, for the rendezvous."""

    @property
    def place(self) -> Path:
        return Path(self.folder)


def kind_of(path: Path) -> str:
    """What a file is for, without the names and numbers that differ from checkpoint to checkpoint."""
    name = path.name
    if name.endswith(".tmp") and ".seal" in name:
        return "new seal"
    if "history" in name:
        return "new history" if name.endswith(".tmp") else "history"
    if name.startswith("lock"):
        return "lock in memory" if "-" in name else "lock"
    if name.endswith((".differences", ".differences.tmp")):
        return "new differences" if name.endswith(".tmp") else "differences"
    for ending in (".seal", ".private", ".share", ".rest", ".copy", ".parity", ".ring"):
        if name.endswith(ending):
            return f"{name.partition('-')[0]} {ending[1:]}"
    if "manifest" in name:
        return "new manifest" if name.endswith(".tmp") else "manifest"
    if name.endswith(".safetensors"):
        return f"{name.partition('-')[0]} part"
    if "latest" in name or "shared" in name:
        return name.lstrip(".").partition("-")[0].partition(".")[0]
    if name.startswith((".step-", "step-")):
        return "folder aside" if name.startswith(".") else "folder"
    return "host" if name.startswith("host-") else "saves"


class Killer(Files):
    """Counts the acts on files, and ends the process with SIGKILL at one of them."""

    def __init__(self, point: str, count: int) -> None:
        self.point, self.left, self.passed = point, count, set[str]()

    def before(self, act: str, path: Path, data: memoryview | bytes | Path = b"", at: int = 0) -> None:
        self.reach(f"{act}: {kind_of(path)}")

    def reach(self, point: str) -> None:
        self.passed.add(point)
        if point == self.point:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


class KillingTrace(Trace):
    """Ends the process at the end of a span."""

    killer: Killer

    def record(self, name: str, kind: Kind, start: float, stop: float, nbytes: int = 0) -> None:
        self.killer.reach(f"after {name}")


class Massive(nn.Module):
    """The tiny model, and weights beside it that every step changes all of."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.tiny = jobs.tiny(0.1)
        self.mass = nn.Parameter(torch.linspace(0.5, 1.5, -(-weights // ROW) * ROW).view(-1, ROW))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tiny(tokens) * self.mass.square().mean()


def work(text: str, rank: int) -> None:
    """One rank of a task that is forked."""
    task = FaultyRun(**json.loads(text))
    os.environ |= {"LOCAL_RANK": str(rank % task.local), "LOCAL_WORLD_SIZE": str(task.local)}
    meeting = task.place / f"meeting-{task.start}"
    train(task, rank, partial(dist.init_process_group, "gloo", init_method=f"file://{meeting}", world_size=task.ranks))


def under_torchrun(text: str) -> None:
    """One rank of a task that torchrun starts."""
    rank = int(os.environ["RANK"])
    task = replace(FaultyRun(**json.loads(text)), start=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    say(task, rank, "pids", json.dumps([task.start, os.getpid()]))
    os.environ |= {"LOCAL_RANK": str(rank % task.local), "LOCAL_WORLD_SIZE": str(task.local)}
    train(task, rank, partial(dist.init_process_group, "gloo"))


def train(
    task: FaultyRun,
    rank: int,
    meet: Callable[..., None],
    killer: Killer | None = None,
    watch: Callable[[Job], None] = lambda job: None,
) -> None:
    """Train to the end, or to this rank's own; what is said lands in the task's folder.

    Args:
        meet: makes the process group, of this `rank`.
        killer: does the acts on files, and is told of spans; by default one that strikes as the task says.
        watch: called with the job once it has been restored, and after each step.
    """
    with (task.place / f"said-{rank}.txt").open("ab") as said:
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    meet(rank=rank)
    killer = killer or Killer(task.point if rank == task.victim else "", task.count)
    attached.Checkpointer = partial(Checkpointer, files=killer)  # pyrefly: ignore[bad-assignment]
    trace = KillingTrace(rank=rank)
    trace.killer = killer
    with trace, job_of(task, trace) as job:
        began = job.restore("auto") if job.restore else None
        say(task, rank, "starts", json.dumps([task.start, began or 0]))
        watch(job)
        for number in range(job.progress.step, task.steps):
            if number == task.steps - 1:
                pass_gate(task)
            world = job.world
            job.step(jobs.batch(number, world.rank, world.size))
            safe = safe_steps(job)
            if task.under == REPLAYED and safe[0]:  # all ranks kept the step before, or this one could not have ended
                safe.append(job.progress.step - 1)
            say(task, rank, "safe", json.dumps([job.progress.step, max(safe), task.start]))
            watch(job)
        (task.place / f"end-{rank}.json").write_text(json.dumps([digest(job), sorted(killer.passed)]))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def gate(task: FaultyRun) -> Iterator[Callable[[], None]]:
    """Keeps the ranks of a task from their last step until it is opened, so that a run cannot end before it is struck.

    Yields:
        What opens it; so does the end of this block, or of the process.
    """
    with (task.place / GATE).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield partial(fcntl.flock, file, fcntl.LOCK_UN)


def pass_gate(task: FaultyRun) -> None:
    """Wait until the gate is open, if there is one."""
    with (task.place / GATE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def job_of(task: FaultyRun, trace: Trace) -> Job:
    """The tiny task of the conformance suite with dropout, and PowerSGD's residuals where ranks are replicas."""
    world = World.current()
    features: list[Feature] = (
        [FSDP()] if task.under == "fsdp" else [DDP(), PowerSGD(rank=1, transport=Transport(parts=1))]
    )
    settings: dict[str, Any] = {"memory_every": 1, "peers_every": 2, "disk_every": 4}
    if task.under == REPLAYED:
        features = [DDP(), Quantize(bits=4)]
        settings |= {"memory_every": 3, "peers_every": 3, "differences": 8, "differences_on": "disk"}
    settings |= {"folder": str(task.place / "saves"), "memory_folder": str(task.place / "memory")}
    features.append(Tiered(**settings | dict(task.settings)))
    job = Job(
        Massive(weights_of(task)) if task.mass else jobs.tiny(0.1),
        optimizer=partial(AdamW, lr=1e-2),
        progress=Progress(total=task.steps),
        world=world,
        trace=trace,
    )
    compose(job, features)
    torch.manual_seed(1000 + world.rank)
    return job


def weights_of(task: FaultyRun) -> int:
    """How many weights the mass is: with AdamW's moments a rank holds its share, or all and PowerSGD's residual."""
    each = 4 * (3 / task.ranks if task.under == "fsdp" else 4)
    return int(task.mass / each)


def safe_steps(job: Job) -> list[int]:
    return [int(job.trace.facts.get(f"checkpoint_safe_{level}", 0)) for level in ("memory", "peers", "disk")]


def say(task: FaultyRun, rank: int, what: str, text: str) -> None:
    """Append a line, which a killed process has said if it is whole."""
    descriptor = os.open(task.place / f"{what}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, text.encode() + b"\n")
    finally:
        os.close(descriptor)


def digest(job: Job) -> str:
    """Of all weights, the optimizer's state and the random numbers to come, on this rank.

    An optimizer that is asked for its state before its first step has zeros where it had nothing: all of them, or none.
    """
    found = hashlib.sha256()
    states = [local(value) for state in job.optimizer.state.values() for value in state.values()]
    stepped = any(each.any() for each in states)
    for tensor in (*map(local, attachments_of(job).module.parameters()), *(states if stepped else [])):
        found.update(tensor.contiguous().numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


# -- starting and killing ---------------------------------------------------------------------------------------------


def start(task: FaultyRun) -> Sequence[ForkedProcess]:
    text = json.dumps(asdict(task))
    return [ForkedProcess(work, [text, rank], number=rank % 2) for rank in range(task.ranks)]


@contextmanager
def started(task: FaultyRun) -> Iterator[Sequence[ForkedProcess]]:
    """The ranks of a task; whoever is left at the end is killed."""
    ranks = start(task)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def run(task: FaultyRun, kill_after: float = 0.0, draw: random.Random | None = None) -> bool:
    """One start of a task: whether it came to its end.

    Args:
        kill_after: seconds after which the victim is killed from outside; 0 never.
        draw: how long the others live on after that, a few hundredths of a second.
    """
    with started(task) as ranks:
        end = time.monotonic() + PATIENCE  # not of what the fork servers import
        killed_at = time.monotonic() + kill_after if kill_after else None
        while all(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
            if killed_at and time.monotonic() >= killed_at:
                ranks[task.victim].kill()
                killed_at = None
            time.sleep(0.002)
        if any(rank.exitcode for rank in ranks):
            time.sleep(draw.uniform(0, 0.05) if draw else 0.0)
            return False
        with suppress(TimeoutError):
            return all(rank.join(max(0.0, end - time.monotonic())) == 0 for rank in ranks)
        return False


@dataclass(frozen=True)
class RunOutcome:
    """What happened to a task that was started until it ended."""

    digests: tuple[str, ...]
    starts: int
    points: Mapping[str, tuple[int, ...]]
    """The named points that its last start passed, and the ranks that did."""


def finished(task: FaultyRun) -> RunOutcome:
    """What a task that has ended left.

    Raises:
        AssertionError: a start resumed from before what had been said to be safe.
    """
    ends = [json.loads((task.place / f"end-{rank}.json").read_text()) for rank in range(task.ranks)]
    begun = lines(task.place / "starts-0.jsonl")
    points: dict[str, tuple[int, ...]] = {}
    for rank, (_, passed) in enumerate(ends):
        points |= {point: (*points.get(point, ()), rank) for point in passed}
    return RunOutcome(tuple(end[0] for end in ends), len(begun), points)


def lines(path: Path) -> list[Any]:
    """The whole lines of a file of JSON lines."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def safe(task: FaultyRun) -> int:
    """The newest step that any rank has said to be safe."""
    return max((line[1] for rank in range(task.ranks) for line in lines(task.place / f"safe-{rank}.jsonl")), default=0)


def began(task: FaultyRun) -> int | None:
    """The step that the newest start resumed from, as the first rank said; None where it did not come that far."""
    found = [line for line in lines(task.place / "starts-0.jsonl") if line[0] == task.start]
    return found[-1][1] if found else None


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    under_torchrun(sys.argv[1])
