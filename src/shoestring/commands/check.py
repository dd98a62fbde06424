"""`shoestring check`: the resolved run, its features in order, and its memory, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.core.feature import arrange_mesh, check_owners, order_of_application
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.models.loading import build_model
from shoestring.naming import resolve
from shoestring.run import Run
from shoestring.training.data_loading import model_arguments

GIB = 2**30


def check(run: Run, workers: int = 1) -> Iterator[str]:
    """Describe the resolved run, the order of its features, its parameters and its memory, line by line.

    Raises:
        ConfigError: training would refuse the run before it allocates anything.
    """
    # Ranks as on one host; no process group is needed to check.
    world = arrange_mesh(World(size=workers, local_size=workers), run.features)
    completed = run.completed(world)
    yield completed.dump()
    told = model_arguments(run)
    with torch.device("meta"):
        model = build_model(run.settings.model, run.model, told, run.settings.seed)
    for key in ("loss", "evaluate"):
        if target := getattr(run.settings, key):
            resolve(target, f"run.{key}")
    job = Job(model, progress=Progress(total=run.settings.steps), world=world)
    job.features = tuple(feature.resolve(world) for feature in completed.features)
    check_owners(job.features)
    for feature in job.features:
        feature.check(job)
    readers = world.ranks_over(job.data_axes)
    micro, rest = divmod(run.settings.batch, readers * run.settings.accumulate)
    if rest or not micro:
        raise ConfigError(
            f"`run.batch` of {run.settings.batch} does not divide by {readers} ranks x {run.settings.accumulate}",
            hint=f"use {max(1, micro) * readers * run.settings.accumulate}",
        )
    yield "order of application:"
    for seam, feature in order_of_application(job.features):
        why = feature.explain(job)
        yield f"  {seam.name:6} {feature.name}{'  (' + why + ')' if why else ''}"
    yield from _memory(job, micro, run)


def _memory(job: Job, micro: int, run: Run) -> Iterator[str]:
    weights = sum(p.numel() * p.element_size() for p in job.model.parameters())
    shards = job.world.ranks_over(job.data_axes) if job.engine == "fsdp" else 1
    state = 4 * weights / shards
    adding = [feature.name for feature in job.features if feature.adds_parameters]
    more = f", without those that {', '.join(adding)} will add" if adding else ""
    yield f"parameters: {sum(p.numel() for p in job.parameters):,}{more}"
    yield f"weights, gradients and optimizer state of a rank: {state / GIB:.3f} GiB (two averages for each weight)"
    try:
        held = activation_bytes(job.model, micro, run.data.sequence)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        yield f"activations: not estimated ({type(error).__name__} on the meta device)"
        return
    yield f"activations of a rank for {micro} samples, without recomputation: {held / GIB:.3f} GiB"
    yield f"sum for a rank: {(state + held) / GIB:.3f} GiB"


def activation_bytes(model: nn.Module, samples: int, sequence: int) -> int:
    """Measure on the meta device the bytes that a forward pass and its loss keep for the backward pass."""
    own = {id(parameter) for parameter in model.parameters()}
    held: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(tensor) not in own and storage._cdata not in held:
            held[storage._cdata] = storage.nbytes()
            kept.append(tensor)  # keeps its storage alive, so that no other one gets the same address
        return tensor

    tokens = torch.zeros(samples, sequence, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy(model(tokens), {"targets": tokens})
    return sum(held.values())
