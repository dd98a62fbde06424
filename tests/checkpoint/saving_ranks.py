"""What the ranks do in the tests of exports: train the tiny task, save, and resume from saves."""

from __future__ import annotations

import hashlib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from shoestring.checkpoint import Tiered
from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.parallel import DDP, FSDP
from shoestring.testing import jobs
from shoestring.testing.scenarios import here


def made(folder: str, total: int = 0, **settings: Any) -> Job:
    """The tiny task under the folder's name: fsdp or ddp where there are several ranks."""
    world, place = here(), Path(folder)
    under = [] if world.size == 1 else [FSDP() if "fsdp" in place.name else DDP()]
    given = {"memory_every": 0, "peers_every": 0, "disk_every": 2} | settings
    tiered = Tiered(folder=str(place / "checkpoints"), memory_folder=str(place / "memory"), **given)
    job = Job(jobs.tiny(), optimizer=partial(AdamW, lr=1e-2), progress=Progress(total=total), world=world)
    return compose(job, [*under, tiered])


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digests(job: Job) -> dict[str, str]:
    """Of every tensor of the model and its optimizer, whole."""
    found: dict[str, Tensor] = {f"model.{name}": value for name, value in job.kept["model"].state.state_dict().items()}
    for name, state in job.kept["optimizer"].state.state_dict()["state"].items():
        found |= {f"optimizer.state.{name}.{key}": value for key, value in state.items()}
    return {name: digest(whole(value)) for name, value in found.items()}


def digest(tensor: Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def train(*, folder: str, steps: int, total: int = 0, resume: bool = False, settings: dict | None = None) -> dict:
    """Train up to a step, from a checkpoint if asked to; what there was at the start and at the end."""
    torch.manual_seed(0)
    with closing(made(folder, total, **(settings or {}))) as job:  # as if it died: nothing is saved at its end
        assert job.restore is not None
        began = job.restore("auto") if resume else None
        first = digests(job)
        for number in range(job.progress.step, steps):
            job.step(jobs.batch(number, job.world.rank, job.world.size))
        last = digests(job)
    return {"began": began, "first": first, "last": last, "step": job.progress.step}
