"""Build the job and the data loader of a run."""

from __future__ import annotations

import random

import numpy as np
import torch

from shoestring import figures
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.data.loader import Loader, check_batch
from shoestring.models.loading import build_model
from shoestring.planning.system import free_memory
from shoestring.run import Run, Settings
from shoestring.training.data_loading import DataSets, sample_bytes
from shoestring.training.user_code import UserCode


def build_job(run: Run, code: UserCode, world: World, data: DataSets, trace: Trace) -> Job:
    """Build the job of a run with its features attached, and seed Python, numpy and torch with the run's seed."""
    settings = run.settings
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(settings.deterministic or deterministic)
    model = build_model(settings.model, run.model, data.model_arguments, settings.seed, trust=code.model)
    if not any(feature.places_model for feature in run.features):
        model = model.to(world.device)
    job = Job(model, code.forward, code.loss, progress=progress_of(settings), world=world, trace=trace)
    attachments_of(job).exits.callback(torch.use_deterministic_algorithms, deterministic)
    compose(job, run.features)
    # All ranks initialised the weights from the same seed. From here on, ranks that read different samples use
    # different seeds, so that dropout masks differ between samples.
    seed = (settings.seed * 1_000_003 + job.world.index_over(attachments_of(job).data_axes)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return job


def progress_of(settings: Settings) -> Progress:
    """The progress of a run before its first step; the total is 0, not known, if `run.minutes` limits the run."""
    return Progress(total=0 if settings.minutes else settings.steps)


def build_loader(job: Job, data: DataSets, settings: Settings, workers: int) -> Loader:
    """Build the loader of this rank's share of each batch. Ranks that work together on a sample get the same share.

    A collective.

    Args:
        workers: number of processes that load samples.

    Raises:
        ConfigError: a batch does not fit into free memory, or is not a multiple of ranks times micro-batches.
    """
    job.world.agree(lambda: check_loading(job, settings, sample_bytes(data.train[0])))
    return Loader(
        data.train,
        batch=settings.batch,
        rank=job.world.index_over(attachments_of(job).data_axes),
        size=job.world.ranks_over(attachments_of(job).data_axes),
        accumulate=settings.accumulate,
        seed=settings.seed,
        workers=workers,
        collate=data.collate,
    )


def check_loading(job: Job, settings: Settings, sample: int) -> None:
    """Check that the batches of a run can be loaded.

    Args:
        sample: size of a sample in bytes.

    Raises:
        ConfigError: a batch does not fit into free memory, or is not a multiple of ranks times micro-batches; or a
            feature needs more gradients in each step.
    """
    readers = job.world.ranks_over(attachments_of(job).data_axes)
    held = settings.batch // readers * job.world.local_size * sample
    if held > (free := free_memory()):
        raise ConfigError(
            f"a step's samples take {figures.memory(held)} on this host, which has {figures.memory(free)} free",
            hint=f"lower run.batch, which is {settings.batch:,}",
        )
    check_batch(settings.batch, 0, readers, settings.accumulate)
    attachments = attachments_of(job)
    averaged = attachments.replicas or attachments.data_axes
    for feature in attachments.features:
        feature.check_gradients(settings.accumulate * job.world.ranks_over(averaged))
