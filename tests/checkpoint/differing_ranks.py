"""What the ranks do in the tests of differential checkpoints: train with a codec, leave off, and continue."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from saving_ranks import digests
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.differences.difference import StepContent
from shoestring.checkpoint.differences.differences import Differences
from shoestring.checkpoint.differences.ring import parsed, wholes
from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.tree import encode as encode_tree
from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.data.loader import Loader
from shoestring.testing import jobs
from shoestring.testing.scenarios import Encoded, decode, here


class WithStatistics(nn.Module):
    """The tiny task's model, with BatchNorm in it: a buffer that each rank has its own of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(jobs.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens)
        return self.norm(logits.flatten(0, 1)).view_as(logits)


class Growing:
    """A state of each rank's own that is larger from a step on."""

    def __init__(self, job: Job, at: int, nbytes: int) -> None:
        self.job, self.at, self.nbytes = job, at, nbytes

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": torch.zeros(self.nbytes if self.job.progress.step >= self.at else 1, dtype=torch.uint8)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing: it follows from the step."""


def samples() -> TensorDataset:
    """Inputs and targets, one sequence each; ranks count differently many of their targets."""
    batches = [jobs.batch(number, 0, 1, ragged=True) for number in range(8)]
    return TensorDataset(*(torch.cat([batch[name] for batch in batches]) for name in ("inputs", "targets")))


def job_of(
    folder: str,
    features: list[Encoded],
    *,
    total: int,
    statistics: bool = False,
    lr: float = 1e-2,
    hosts: int = 1,
    **settings: Any,
) -> Job:
    """The tiny task with dropout under some features and differential checkpoints."""
    world, place = here(), Path(folder)
    local = world.size // hosts
    world = replace(world, local_size=local, local_rank=world.rank % local, layout=world.axes)
    given = {"memory_every": 4, "peers_every": 0, "disk_every": 0, "differences": 16} | settings
    tiered = Tiered(folder=str(place / "checkpoints"), memory_folder=str(place / "memory"), **given)
    model = WithStatistics(jobs.tiny(0.1)) if statistics else jobs.tiny(0.1)
    job = Job(model, optimizer=partial(AdamW, lr=lr), progress=Progress(total=total), world=world)
    return compose(job, [*map(decode, features), tiered])


def train(
    *,
    folder: str,
    features: list[Encoded],
    steps: int,
    resume: bool | str = False,
    total: int = 100,
    fault: str = "",
    told: int = 1_000,
    grows: int = 1_000,
    **settings: Any,
) -> dict[str, Any]:
    """Train up to a step, as if the process was killed then; what there was at the start and at the end.

    Args:
        resume: True for "auto"; or from where.
        fault: what is wrong with the replay.
        told: from this step on, the state after each is told as well.
        grows: from this step on, a rank's own state has 40,000 bytes more.
    """
    with FAULTS[fault](), closing(job_of(folder, features, total=total, **settings)) as job:
        torch.manual_seed(1000 + job.world.rank)
        loader = Loader(samples(), batch=4, rank=job.world.rank, size=job.world.size, accumulate=2, seed=1)
        job.keep("loader", loader)
        job.keep("growing", Growing(job, grows, 40_000))
        assert job.restore is not None
        began = job.restore(resume if isinstance(resume, str) else "auto") if resume else None
        first, losses, each = everything(job), [], {}
        batches = iter(loader)
        while job.progress.step < steps:
            micro = next(batches)
            losses.append(float(job.step(*({"inputs": x, "targets": y} for x, y in micro))))
            if job.progress.step >= told:
                each[job.progress.step] = everything(job)
        facts = {name: value for name, value in job.trace.facts.items() if name.startswith("checkpoint")}
        last = everything(job)
        return {"began": began, "first": first, "last": last, "each": each, "losses": losses, "facts": facts}


def everything(job: Job) -> dict[str, Any]:
    """Digests of all that survives."""
    names = ("progress", "random", "comm", "loader")
    return digests(job) | {name: small(job.kept[name].state.state_dict()) for name in names if name in job.kept}


def small(state: Mapping[str, Any]) -> str:
    """A state of numbers and small tensors in words."""
    tensors: dict[str, Tensor] = {}
    tree = encode_tree(state, "", tensors)
    return hashlib.sha256(
        json.dumps([tree, {name: each.tolist() for name, each in tensors.items()}]).encode()
    ).hexdigest()


@contextmanager
def other_average() -> Iterator[None]:
    """On the second rank, replay a step of which one byte is another, although its checksum fits."""

    def step(self: StepContent, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        if header["step"] == 14 and here().rank == 1:
            tensors = dict(tensors)
            tensors["average 0.0"] = tensors["average 0.0"].clone()
            tensors["average 0.0"].view(-1)[:1000] += 1
        return before(self, header, tensors)

    before, StepContent.step = StepContent.step, step
    try:
        yield
    finally:
        StepContent.step = before


@contextmanager
def forgotten_states() -> Iterator[None]:
    """Leave the states that no optimizer makes as the checkpoint has them."""
    before, StepContent.finish = StepContent.finish, lambda *_: None
    try:
        yield
    finally:
        StepContent.finish = before


@contextmanager
def all_arrived() -> Iterator[None]:
    """End when what was sent to another host is there, as in the middle of the next forward pass."""

    def close(self: Differences, *, forget: bool) -> None:
        self.settle()
        before(self, forget=forget)

    before, Differences.close = Differences.close, close
    try:
        yield
    finally:
        Differences.close = before


FAULTS = {
    "": nullcontext,
    "all arrived": all_arrived,
    "other average": other_average,
    "forgotten states": forgotten_states,
}


def cells_of(path: Path) -> dict[int, int]:
    """By step, where the cell of the step's difference begins in a ring's file of 16 cells."""
    cells, size = struct.unpack("<8sIIQ", path.read_bytes()[:24])[2:]
    assert cells == 16
    return {step: 4096 + step % cells * size for step in (13, 14, 15)}


def ring_of(folder: str, rank: int) -> Path:
    """The file with the differences of a rank of the only host."""
    (path,) = Path(folder, "memory").glob(f"*/*/host-0/steps-{rank}.ring")
    return path


def change_average(path: Path, at: int) -> None:
    """Change an average of the difference in a cell, whose checksum then fits."""
    data = torch.from_numpy(np.memmap(path, np.uint8, mode="r+"))
    cell = next(wholes(data[at:]))
    _, tensors = parsed(cell)
    tensors["average 0.0"].view(-1)[:1000].view(torch.uint8).add_(1)
    mark = struct.pack("<I", crc32(cell[24:].numpy().data))
    cell[8:12] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def on_disk(folder: str, step: int) -> list[str]:
    """The folders of checkpoints of a step."""
    return [str(path) for path in Path(folder, "checkpoints").glob(f"step-{step:08d}-*")]
