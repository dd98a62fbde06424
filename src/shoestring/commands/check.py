"""`shoestring check`: the resolved run, its features in order, and its memory, without starting anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from shoestring.core.errors import ConfigError
from shoestring.core.feature import arrange_mesh, check_owners, order_of_application
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.memory.exhausted import advice
from shoestring.memory.predicted import Prediction, predict
from shoestring.models.loading import build_model
from shoestring.naming import resolve
from shoestring.planning.system import free_memory
from shoestring.report.figures import size
from shoestring.run import Run
from shoestring.training.budget import within_budget
from shoestring.training.data_loading import model_arguments

log = logging.getLogger("shoestring")
GIB = 2**30


def check(run: Run, workers: int = 1) -> Iterator[str]:
    """Describe the resolved run, the order of its features, its parameters and its memory, line by line.

    Raises:
        ConfigError: training would refuse the run before it allocates anything.
    """
    # Ranks as on one host; no process group is needed to check.
    world = arrange_mesh(World(size=workers, local_size=workers), run.features)
    run = completed = within_budget(run.completed(world), world)
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
    adding = [feature.name for feature in job.features if feature.adds_parameters]
    more = f", without those that {', '.join(adding)} will add" if adding else ""
    yield f"parameters: {sum(p.numel() for p in job.parameters):,}{more}"
    loss = resolve(run.settings.loss, "run.loss") if run.settings.loss else cross_entropy
    shape = micro, run.data.sequence
    try:
        predicted = predict(
            job.model, job.features, loss, shape, ranks=job.world.size, accumulate=run.settings.accumulate
        )
    except Exception as error:  # whatever a feature or a model does that cannot work without numbers
        log.debug("the step cannot be predicted", exc_info=error)
        yield f"memory: not predicted ({type(error).__name__} in a step without numbers; --debug shows where)"
        return
    held = predicted.window.by_kind()
    state = sum(held.get(kind, 0) for kind in ("parameter", "buffer", "gradient", "optimizer state"))
    yield f"weights, gradients and optimizer state of a rank at its peak: {state / GIB:.3f} GiB"
    yield f"activations of a rank for {micro} samples, and all else: {(predicted.peak - state) / GIB:.3f} GiB"
    yield f"sum for a rank: {predicted.peak / GIB:.3f} GiB, predicted from its operators"
    yield "  " + ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in sorted(held.items(), key=lambda item: -item[1]))
    if predicted.host:
        yield f"host memory for what is offloaded, beside it: {predicted.host / GIB:.3f} GiB"
    if predicted.unseen:
        yield f"  without what {', '.join(predicted.unseen)} may take"
    yield from _room(job, predicted, held)


def _room(job: Job, predicted: Prediction, held: Mapping[str, int]) -> Iterator[str]:
    """Whether it fits into this machine, and what to change where it does not."""
    ranks = job.world.size
    if torch.cuda.is_available():
        needed, there, what = predicted.peak, torch.cuda.get_device_properties(0).total_memory, "this GPU"
    else:
        needed, there, what = (
            predicted.peak + predicted.host,
            free_memory() / ranks,
            "this host's free memory" + (f" for each of {ranks} ranks" if ranks > 1 else ""),
        )
    if needed > there:
        yield f"it does not fit into {what}, {size(there)}; {advice(job, held)}"
