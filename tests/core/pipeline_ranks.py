"""What two ranks do that train one model in two stages, and the owner of SHARD that runs their micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring import optim
from shoestring.core.attachments import Attachments
from shoestring.core.compose import compose
from shoestring.core.errors import NonFiniteError
from shoestring.core.feature import LOCAL, Feature, Phase, Seam
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.step import MicroBatches
from shoestring.core.world import World
from shoestring.testing import jobs


class TwoStages(nn.Module):
    """Tokens to logits, in two halves without a common parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(jobs.VOCABULARY, jobs.WIDTH), jobs.ResidualBlock(0.0))
        self.second = nn.Sequential(jobs.ResidualBlock(0.0), nn.Linear(jobs.WIDTH, jobs.VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(tokens))


@dataclass(frozen=True, kw_only=True)
class Pipeline(Feature):
    """A stage on each of two ranks: all forward passes, then all backward passes, the newest first (GPipe)."""

    seams: ClassVar = (Seam.SHARD,)
    over: ClassVar = ("stage",)

    def arrange(self, world: World) -> World:
        return world.split(LOCAL, "stage", 2)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.own("SHARD over stage", Seam.SHARD)
        name = ("first", "second")[attachments.world.index_over(self.over)]
        mine = {key: tensor for key, tensor in attachments.trained.items() if key.startswith(name)}
        attachments.shard(over=(), trained=mine, run=Schedule(attachments).run)


class Schedule:
    def __init__(self, attachments: Attachments) -> None:
        self.model, self.stage = attachments.module, attachments.world.index_over(["stage"])
        self.dtype = next(self.model.parameters()).dtype

    def run(self, micro: MicroBatches) -> None:
        waiting: list[tuple[Tensor, Tensor]] = []  # what a stage received or sent, and where its backward pass begins
        for index, batch in enumerate(micro.batches):
            with micro.sync(index == 0), micro.computing():
                waiting.append(self.first(batch) if self.stage == 0 else self.second(micro, batch))
        if not micro.training:
            return
        for index, (hidden, root) in reversed(list(enumerate(waiting))):
            with micro.sync(index == 0):  # whose backward pass is the last
                if self.stage == 0:
                    dist.recv(gradient := torch.empty_like(hidden), 1)
                    root.backward(gradient)
                else:
                    root.backward()
                    assert hidden.grad is not None
                    dist.send(hidden.grad, 0)

    def first(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.model.get_submodule("first")(batch["inputs"])
        dist.send(hidden.detach(), 1)
        return hidden.detach(), hidden

    def second(self, micro: MicroBatches, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = torch.empty(*batch["inputs"].shape, jobs.WIDTH, dtype=self.dtype)
        dist.recv(hidden, 0)
        hidden.requires_grad_(micro.training)
        return hidden, micro.loss(self.model.get_submodule("second")(hidden), batch)


def micro_batches(step: int, count: int) -> list[dict[str, Tensor]]:
    """Micro-batches of unequal counts."""
    return [jobs.batch(step, index, count, ragged=True) for index in range(count)]


def build(features: list[Feature], steps: int = 3, **arguments: Any) -> Job:
    torch.manual_seed(0)
    model = TwoStages().double()
    return compose(Job(model, optimizer=jobs.sgd(), progress=Progress(total=steps), **arguments), features)


def train(*, accumulate: int, stop_at: int = -1) -> dict[str, Any]:
    """Losses, held-out loss and sums of the weights that this rank trains; one process trains the whole model."""
    world = World.current()
    seen: list[Phase] = []
    job = build([Pipeline()] if world.size > 1 else [], world=world)
    attachments = attachments_of(job)
    attachments.at(Phase.CLIP, lambda: seen.append(Phase.CLIP))
    with job:
        losses = []
        for step in range(3):
            if step == stop_at and world.rank == 0:  # the stage that never sees a loss
                job.stop()
            losses.append(float(job.step(*micro_batches(step, accumulate))))
            if job.done:
                break
        held_out = job.evaluate(micro_batches(jobs.HELD_OUT, 2))
        weights = {name: float(tensor.double().sum()) for name, tensor in attachments.trained.items()}
        return {
            "losses": losses,
            "held_out": held_out,
            "weights": weights,
            "tokens": job.progress.tokens,
            "clipped": len(seen),
        }


def poisoned() -> str:
    """The loss is not finite, which only the last stage sees."""
    world = World.current()
    torch.manual_seed(0)
    job = Job(
        TwoStages(), loss=lambda output, batch: (output.sum() * float("nan"), 1), optimizer=jobs.sgd(), world=world
    )
    with compose(job, [Pipeline(), optim.Clip(max_norm=1.0)]):
        before = [tensor.clone() for tensor in attachments_of(job).parameters]
        try:
            job.step(*micro_batches(0, 2))
        except NonFiniteError as error:
            same = all(map(torch.equal, before, attachments_of(job).parameters))
            job.stop()
            return f"{error.args[0]}; weights as before: {same}"
    return "nothing"
