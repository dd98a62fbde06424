"""What the ranks do in the tests of differential checkpoints: train with a codec, leave off, and continue."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from saving_ranks import digests
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from shoestring.checkpoint import Tiered
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


def samples() -> TensorDataset:
    """Inputs and targets, one sequence each; ranks count differently many of their targets."""
    batches = [jobs.batch(number, 0, 1, ragged=True) for number in range(8)]
    return TensorDataset(*(torch.cat([batch[name] for batch in batches]) for name in ("inputs", "targets")))


def job_of(folder: str, features: list[Encoded], *, total: int, statistics: bool = False, **settings: Any) -> Job:
    """The tiny task with dropout under some features and differential checkpoints."""
    world, place = here(), Path(folder)
    given = {"memory_every": 4, "peers_every": 0, "disk_every": 0, "differences": 16} | settings
    tiered = Tiered(folder=str(place / "checkpoints"), memory=str(place / "memory"), **given)
    model = WithStatistics(jobs.tiny(0.1)) if statistics else jobs.tiny(0.1)
    optimizer = lambda parameters: AdamW(parameters, lr=1e-2)  # noqa: E731
    job = Job(model, optimizer=optimizer, progress=Progress(total=total), world=replace(world))
    return compose(job, [*map(decode, features), tiered])


def train(
    *, folder: str, features: list[Encoded], steps: int, resume: bool = False, total: int = 100, **settings: Any
) -> dict[str, Any]:
    """Train up to a step, as if the process was killed then; what there was at the start and at the end."""
    with closing(job_of(folder, features, total=total, **settings)) as job:
        torch.manual_seed(1000 + job.world.rank)
        loader = Loader(samples(), batch=4, rank=job.world.rank, size=job.world.size, accumulate=2, seed=1)
        job.keep("loader", loader)
        assert job.restore is not None
        began = job.restore("auto") if resume else None
        first, losses = everything(job), []
        for micro in loader:
            if job.progress.step == steps:
                break
            losses.append(float(job.step(*({"inputs": x, "targets": y} for x, y in micro))))
        facts = {name: value for name, value in job.trace.facts.items() if name.startswith("checkpoint")}
        return {"began": began, "first": first, "last": everything(job), "losses": losses, "facts": facts}


def everything(job: Job) -> dict[str, Any]:
    """Digests of tensors, and the rest of what survives."""
    names = ("progress", "random", "comm")
    return digests(job) | {name: str(job.kept[name].state.state_dict()) for name in names if name in job.kept}
