"""Build the job and the data loader of a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shoestring import figures
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.feature import DATA, arrange_mesh, splitting
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.task import Batch
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.data.clients import ClientLoader, Clients, ClientStates
from shoestring.data.loader import Loader, check_batch
from shoestring.planning.system import free_memory
from shoestring.run import Run, Settings
from shoestring.training.data_loading import DataSets, sample_bytes
from shoestring.training.user_code import UserCode


def build_job(run: Run, code: UserCode, world: World, data: DataSets, trace: Trace) -> Job:
    """Build the job of a run with its features attached, and seed Python, numpy and torch with the run's seed."""
    settings = run.settings
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(settings.deterministic or deterministic)
    model = code.model.build(data.model_arguments)
    if not any(feature.places_model for feature in run.features):
        model = model.to(world.device)
    example = partial(example_batch, data, micro_batch(settings, arrange_mesh(world, run.features)))
    progress = progress_of(settings)
    job = Job(model, code.forward, code.loss, progress=progress, world=world, trace=trace, example=example)
    attachments_of(job).exits.callback(torch.use_deterministic_algorithms, deterministic)
    compose(job, run.features)
    # All ranks initialised the weights from the same seed. From here on, ranks that read different samples use
    # different seeds, so that their dropout masks differ.
    seed = _seed_of_rank(settings.seed, job.world.index_over(attachments_of(job).data_axes))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return job


def micro_batch(settings: Settings, world: World) -> int:
    """Number of samples in a rank's micro-batch, at least 1.

    Args:
        world: the mesh, including the axes that the run's features add.
    """
    return max(settings.batch // world.ranks_over(DATA) // settings.accumulate, 1)


def example_batch(data: DataSets, samples: int) -> Batch:
    """A batch of the first samples of the data, with the same entries and sizes as the loader's batches."""
    batch = data.first_batch(samples)
    return {**batch, "ids": torch.arange(samples)} if isinstance(batch, dict) else batch


def _seed_of_rank(seed: int, rank: int) -> int:
    return (seed * 1_000_003 + rank) % 2**63


def keep_loader(job: Job, loader: Loader | ClientLoader, data: DataSets) -> None:
    """Let checkpoints hold the loader's position, or every rank's position if ranks have their own data or clients."""
    if isinstance(loader, ClientLoader):
        job.keep("loader", loader, across="own", merge=loader.merge)
    elif data.of_ranks:
        job.keep("loader", loader, across="own", merge=_same_ranks)
    else:
        job.keep("loader", loader)


def _same_ranks(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Raise CheckpointError, because the data positions of ranks are useless on a different number of ranks."""
    raise CheckpointError(
        f"{len(states)} ranks had data of their own, and now there are {size}", hint=f"resume on {len(states)} ranks"
    )


def progress_of(settings: Settings) -> Progress:
    """The progress of a run before its first step; if `run.minutes` limits the run, the total is 0: not known."""
    return Progress(total=0 if settings.minutes else settings.steps)


def build_loader(
    job: Job, data: DataSets, settings: Settings, workers: int, absent: float = 0.0
) -> Loader | ClientLoader:
    """Build the loader of this rank's share of each batch. Ranks that share samples (a pipeline) get equal shares.

    A collective.

    Args:
        workers: number of processes that load samples.
        absent: probability with which a client is absent from a round.

    Raises:
        ConfigError: a batch does not fit into free memory, or is not a multiple of ranks times micro-batches; or ranks
            that should work on the same samples have different data sets.
    """
    job.world.agree(lambda: check_loading(job, settings, sample_bytes(data.train[0])))
    rank, size = (of(attachments_of(job).data_axes) for of in (job.world.index_over, job.world.ranks_over))
    batch, seed = settings.batch, settings.seed
    if isinstance(data.train, Clients):
        return ClientLoader(
            data.train,
            steps=client_states(job).steps,
            batch=batch,
            rank=rank,
            size=size,
            accumulate=settings.accumulate,
            seed=seed,
            absent=absent,
            collate=data.collate,
        )
    if data.of_ranks:
        if size < job.world.size:
            raise ConfigError(
                "data.per_rank is set, but several ranks work together on each sample",
                hint="remove data.per_rank or the feature that splits the model",
            )
        batch, seed, rank, size = batch // size, _seed_of_rank(seed, rank), 0, 1
    return Loader(
        data.train,
        batch=batch,
        rank=rank,
        size=size,
        accumulate=settings.accumulate,
        seed=seed,
        workers=workers,
        collate=data.collate,
    )


def client_states(job: Job) -> ClientStates:
    """The states of the clients that a feature of the job trains in turn.

    Raises:
        ConfigError: no feature of the job trains clients in turn.
    """
    for entry in job.kept.values():
        if isinstance(entry.state, ClientStates):
            return entry.state
    raise ConfigError("no feature of this job trains clients in turn", hint="add comm.FedAvg")


def check_loading(job: Job, settings: Settings, sample: int) -> None:
    """Check that the batches of a run can be loaded.

    Args:
        sample: size of a sample in bytes.

    Raises:
        ConfigError: a batch does not fit into free memory, or is not a multiple of ranks times micro-batches; or a
            feature needs more gradients in each step than the run computes.
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
    if settings.evaluate and (names := splitting(attachments.features, job.world)):
        message = f"`run.evaluate` needs the whole model, but with `{names[0]}` a rank holds only a part"
        raise ConfigError(message, hint="evaluate the exported model after the run: shoestring evaluate")
    averaged = attachments.replicas or attachments.data_axes
    for feature in attachments.features:
        feature.check_gradients(settings.accumulate * job.world.ranks_over(averaged))
