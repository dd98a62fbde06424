"""What the ranks do in the tests of local steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from shoestring.core.compose import attach, compose
from shoestring.core.errors import NonFiniteError
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.testing import jobs
from shoestring.testing.scenarios import Encoded, features_of, here


class Normed(jobs.Tiny):
    """With a norm that keeps running averages, which differ between replicas, and a mask that has no mean."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.running = nn.BatchNorm1d(jobs.WIDTH)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.finfo(torch.float32).min]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(self.running(hidden.transpose(1, 2)).transpose(1, 2)))


@cache
def world_of(local: int) -> World:
    """This process's world, taken as hosts of `local` ranks; 0 leaves it as it is. One mesh for all scenarios."""
    world = here()
    if local:
        world = replace(world, local_rank=world.rank % local, local_size=local)
        assert world.mesh is not None
    return world


def weights(job: Job) -> list[float]:
    """All trained weights, whole."""
    parts = [
        p.full_tensor() if isinstance(p, DTensor) else p
        for p in attachments_of(job).module.parameters()
        if p.requires_grad
    ]
    return torch.cat([part.detach().double().flatten() for part in parts]).tolist()


def digest(job: Job) -> str:
    """Of the weights and buffers."""
    tensors = [*attachments_of(job).module.parameters(), *attachments_of(job).module.buffers()]
    parts = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return hashlib.sha256(b"".join(p.detach().contiguous().numpy().tobytes() for p in parts)).hexdigest()


def share(number: int, world: World, micro: int, ragged: bool) -> list[dict[str, Tensor]]:
    """This rank's share of a batch, in micro-batches."""
    rows = jobs.batch(number, world.rank, world.size, ragged=ragged)
    return [{name: value.chunk(micro)[index] for name, value in rows.items()} for index in range(micro)]


def train(
    *,
    features: Sequence[Encoded],
    steps: int,
    local: int = 0,
    model: str = "tiny",
    precise: bool = True,
    micro: int = 1,
    ragged: bool = False,
    stops: dict[str, int] | None = None,
    poison: dict[str, int] | None = None,
    folder: str = "",
    resume: str = "",
    open_end: bool = False,
    draw: bool = False,
) -> dict[str, Any]:
    """Train; the weights and what was published after every step.

    Args:
        stops: the step before which a rank asks to stop, by rank. poison: in which its loss becomes NaN.
        draw: other first weights on every rank.
    """
    world = world_of(local)
    built = Normed() if model == "normed" else jobs.tiny()
    if draw:
        torch.manual_seed(world.rank)
        nn.init.normal_(built.embedding.weight)
    bad = (poison or {}).get(str(world.rank), 0)

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(output, batch)
        return (total * torch.nan if job.progress.step + 1 == bad else total), count

    progress = Progress(total=0 if open_end else steps)
    optimizer = jobs.sgd(0.1)
    job = Job(built.double() if precise else built, loss=loss, optimizer=optimizer, progress=progress, world=world)
    compose(job, features_of(features, folder))
    found: dict[str, Any] = {"digests": [], "weights": [], "numbers": [], "said": "", "first": digest(job)}
    with job:
        if resume and job.restore is not None:
            job.restore(resume)
            found["restored"] = weights(job)
        try:
            for number in range(job.progress.step, steps):
                if (stops or {}).get(str(world.rank)) == number + 1:
                    job.stop()
                job.step(*share(number, world, micro, ragged))
                found["digests"].append(digest(job))
                found["weights"].append(weights(job))
                found["numbers"].append({name: float(value) for name, value in job.numbers.items()})
                if attachments_of(job).stopping:
                    break
        except NonFiniteError as error:
            found["said"] = str(error)
        found["step"], found["tokens"] = job.progress.step, job.progress.tokens
        reductions = [feature.reduction(job.trace) for feature in attachments_of(job).features]
        found["reductions"] = [f"{cut.used:.6g} {cut.cost}" for cut in reductions if cut is not None]
    return found


def foreign(*, features: Sequence[Encoded], steps: int, poison: int) -> dict[str, Any]:
    """A loop of one's own in which rank 1 ruins its weights after a step."""
    world = here()
    model = jobs.tiny()
    optimizer = SGD(model.parameters(), lr=0.1)
    job = attach(model, optimizer, *features_of(features))
    said = ""
    with job:
        try:
            for number in range(steps):
                batch = jobs.batch(number, world.rank, world.size)
                F.cross_entropy(model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 1 and number + 1 == poison:
                    model.norm.bias.data[0] = torch.nan
        except NonFiniteError as error:
            said = str(error)
    return {"said": said, "digest": digest(job)}


def held(*, features: Sequence[Encoded], steps: int) -> list[str]:
    """Digests of the outer optimizer's own copy after every step, while replicas differ."""
    world = here()
    job = Job(jobs.tiny(), optimizer=jobs.sgd(0.1), progress=Progress(total=steps), world=world)
    found = []
    with compose(job, features_of(features)):
        for number in range(steps):
            job.step(jobs.batch(number, world.rank, world.size))
            anchors = job.kept["outer"].state.state_dict()["anchor"].values()
            found.append(hashlib.sha256(b"".join(each.numpy().tobytes() for each in anchors)).hexdigest())
    return found


def saves(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("checkpoints/step-*.safetensors"))
