"""A run's job and its loader, built from the run file."""

from __future__ import annotations

import random

import numpy as np
import torch

from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.task import call_model, cross_entropy
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.data.loader import Loader
from shoestring.memory import LoRA
from shoestring.models.loading import build_model
from shoestring.naming import resolve
from shoestring.planning.system import free_memory
from shoestring.run import Run
from shoestring.training.data_loading import DataSets, sample_bytes


def build_job(run: Run, world: World, data: DataSets, trace: Trace) -> Job:
    """The run's job, composed; from here on, random numbers are drawn from the run's seed."""
    settings = run.settings
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(settings.deterministic or deterministic)
    model = build_model(settings.model, run.model, data.model_arguments, settings.seed)
    if not any(isinstance(feature, LoRA) and feature.places_model for feature in run.features):
        model = model.to(world.device)
    loss = resolve(settings.loss, "run.loss") if settings.loss else cross_entropy
    progress = Progress(total=0 if settings.minutes else settings.steps)
    job = Job(model, call_model, loss, progress=progress, world=world, trace=trace)
    job.exits.callback(torch.use_deterministic_algorithms, deterministic)
    compose(job, run.features)
    # Weights are drawn from one seed on all ranks; what is drawn from here on (dropout) differs between the samples.
    seed = (settings.seed * 1_000_003 + job.world.index_over(job.data_axes)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return job


def build_loader(run: Run, job: Job, data: DataSets) -> Loader:
    """This rank's share of the run's batches, the same for ranks that share the work on it; every rank calls it.

    Raises:
        ConfigError: a batch needs more memory than there is, or does not divide by ranks and micro-batches.
    """
    job.world.agree(lambda: _check_room(run, job, data))
    return Loader(
        data.train,
        batch=run.settings.batch,
        rank=job.world.index_over(job.data_axes),
        size=job.world.ranks_over(job.data_axes),
        accumulate=run.settings.accumulate,
        seed=run.settings.seed,
        workers=run.data.workers,
    )


def _check_room(run: Run, job: Job, data: DataSets) -> None:
    readers = job.world.ranks_over(job.data_axes)
    held = run.settings.batch // readers * job.world.local_size * sample_bytes(data.train[0])
    if held > (free := free_memory()):
        raise ConfigError(
            f"a step's samples take {held / 1e9:,.3g} GB on this host, which has {free / 1e9:.3g} GB of memory free",
            hint=f"lower run.batch, which is {run.settings.batch:,}",
        )
