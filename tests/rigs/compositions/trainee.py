"""What each rank runs for a drawn composition: a whole run, one that is broken off, and the rest of that one.

Arguments and results are of JSON types.
"""

from __future__ import annotations

import base64
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.checkpoint import Plain, Tiered
from shoestring.checkpoint.format.state import pack, unpack
from shoestring.core.compose import compose
from shoestring.core.errors import ShoestringError
from shoestring.core.feature import DATA, splits_replicas
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.task import Batch
from shoestring.core.world import World
from shoestring.testing import jobs, scenarios
from shoestring.testing.held_resources import fresh_garbage, held_resources
from tests.rigs.compositions import models

Weights = dict[str, Tensor]


@cache
def world_of(local_size: int) -> World:
    """This process's world with so many ranks a host; one for all compositions, with the groups of its mesh made."""
    world = scenarios.here()
    if world.size == 1:
        return world
    world = replace(world, local_size=local_size, local_rank=world.rank % local_size)
    assert world.mesh is not None
    return world


def attempt(
    *,
    features: Sequence[scenarios.Encoded],
    folder: str,
    local_size: int,
    model: str,
    micro_batches: int,
    ragged: bool,
    steps: int,
    stop: int,
    parts: int = 1,
    resumes: bool = True,
) -> dict[str, Any]:
    """Train with the features, and again, broken off after step `stop` as by a kill, and resumed.

    Args:
        parts: into how many ranks' shares one process divides a batch; it takes each share's micro-batches.
        resumes: whether to stop and resume.

    Returns:
        `whole` and `rest`, or what was raised: `error`, `message`, `step` (-1 while composing), and what is `left`.
    """
    world = world_of(local_size)
    run = _Run(world, features, model, micro_batches, ragged, steps, parts)
    torch.manual_seed(1000 + world.rank)
    whole = run(f"{folder}/whole")
    if "error" in whole or not resumes:
        return whole if "error" in whole else {"whole": whole}
    torch.manual_seed(1000 + world.rank)
    killed = run(f"{folder}/killed", kill=stop)
    rest = killed or run(f"{folder}/killed", resume=True)
    return {"whole": whole, "rest": rest}


class _Run:
    def __init__(
        self,
        world: World,
        features: Sequence[scenarios.Encoded],
        model: str,
        micro_batches: int,
        ragged: bool,
        steps: int,
        parts: int,
    ) -> None:
        self.world, self.features, self.model = world, features, model
        self.micro_batches, self.ragged, self.steps, self.parts = micro_batches, ragged, steps, parts

    def __call__(self, folder: str, kill: int = 0, resume: bool = False) -> dict[str, Any]:
        model = models.build(self.model)
        features = scenarios.features_of(self.features, folder)
        if self.world.size == 1:  # what is compared with: the whole model
            features = [each for each in features if not splits_replicas(each)]
        if not any(each.name.startswith("checkpoint.") for each in features):
            parted = self.world.size > 1 and any(map(splits_replicas, features))
            every = {"memory_folder": f"{folder}/memory", "memory_every": 1, "disk_every": 1}
            features.append(Tiered(folder=folder, **every) if parted else Plain(folder=folder, every=kill))
        job = Job(model, optimizer=jobs.sgd(0.05), progress=Progress(total=self.steps), world=self.world)
        with fresh_garbage():
            before = held_resources(model)
            step = -1
            try:
                with compose(job, features):
                    assert job.restore is not None
                    step = (job.restore("auto") or 0) if resume else 0
                    result: dict[str, Any] = {"start": step, "losses": [], "gains": []}
                    while step < self.steps:
                        result["losses"].append(float(job.step(*self._batches(job, step))))
                        result["gains"].append(float(job.numbers.get("gain", 1.0)))
                        step += 1
                        if step == kill:
                            raise scenarios.PlannedError
                        if step % 3 == 0:
                            self._evaluated(job)
                    result["averaged"] = self._evaluated(job)
                    result["held_out"] = self._held_out(job)
                    weights = _of_all_ranks(job)
                    result["weights"] = _encode(weights)
                    result["names"] = [name for name, value in weights.items() if value.is_floating_point()]
                    return result
            except scenarios.PlannedError:
                return {}
            except Exception as error:
                failed = error
            left = sorted((held_resources(model) - before).elements()) if step < 0 else []
        return {
            "error": type(failed).__name__,
            "known": isinstance(failed, ShoestringError),
            "message": f"{failed}",
            "step": step,
            "left": left,
            "detail": "".join(traceback.format_exception(failed))[-3000:],
        }

    def _batches(self, job: Job, number: int) -> list[Batch]:
        """The micro-batches of this rank; of one process alone those of all `parts` readers, in their order."""
        alone = self.world.size == 1
        ranks = range(self.parts) if alone else [job.world.index_over(DATA)]
        size = self.parts if alone else job.world.ranks_over(DATA)
        shares = [jobs.batch(number, rank, size, ragged=self.ragged) for rank in ranks]
        return [
            {name: value.chunk(self.micro_batches)[index] for name, value in share.items()}
            for share in shares
            for index in range(self.micro_batches)
        ]

    def _evaluated(self, job: Job) -> str:
        """The weights that evaluations see."""
        with attachments_of(job).evaluating():
            if any(map(splits_replicas, attachments_of(job).features)):
                return _encode(_of_all_ranks(job))
            state = {
                name: _whole(value).detach().clone() for name, value in attachments_of(job).module.state_dict().items()
            }
        return _encode(state)

    def _held_out(self, job: Job) -> float:
        place = job.world.index_over(DATA), job.world.ranks_over(DATA)
        total, count = job.evaluate([jobs.batch(jobs.HELD_OUT, *place)])
        return total / count


def _of_all_ranks(job: Job) -> Weights:
    """All weights of the model, also those that other ranks hold (stages of a pipeline), in the order of its names."""
    attachments = attachments_of(job)
    weights = {name: attachments.whole(name, value).detach().clone() for name, value in attachments.weights().items()}
    if attachments.parted:
        for data in job.world.gather(pack(weights)):
            weights = unpack(data) | weights
        weights = {name: weights[name] for name in attachments.module.state_dict() if name in weights}
    return weights


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _encode(weights: Weights) -> str:
    """All floating-point entries by the order of names, in double precision."""
    flat = [weights[name].double().flatten() for name in sorted(weights) if weights[name].is_floating_point()]
    return base64.b64encode(torch.cat(flat).numpy().tobytes()).decode()
