"""`shoestring check`: describes the resolved run, its features in order, and its memory, without starting anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from shoestring import figures
from shoestring.core.attachments import Attachments
from shoestring.core.compose import compose
from shoestring.core.errors import ShoestringError
from shoestring.core.feature import (
    arrange_mesh,
    check_owners,
    order_of_application,
    resolve_all,
    splits_replicas,
    splitting,
)
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.task import Batch
from shoestring.core.world import World
from shoestring.memory.exhausted import advice
from shoestring.memory.predicted import device_type, predict
from shoestring.planner.measure import measure_sizes
from shoestring.planner.search import as_trained
from shoestring.planning.predict import peaks
from shoestring.planning.step import Plannable, planned_step
from shoestring.planning.system import free_memory
from shoestring.run import Run
from shoestring.training.build import check_loading, example_batch, micro_batch, progress_of
from shoestring.training.choices import within_budget
from shoestring.training.data_loading import (
    DataSets,
    check_form,
    sample_bytes,
    sequence_of,
    with_steps,
)
from shoestring.training.evaluation import check_evaluations
from shoestring.training.named_files import check_named_files
from shoestring.training.preview import DataPreview, preview
from shoestring.training.run_folder import check_claim, check_resume
from shoestring.training.user_code import UserCode, import_user_code

log = logging.getLogger("shoestring")
GIB = 2**30


def check(run: Run, workers: int = 1) -> Iterator[str]:
    """Describe the resolved run, the order of its features, its number of parameters and its memory, line by line.

    The check calls the same functions in the same order as `training.loop.train`, up to the start of ranks, so it
    refuses every run that training would refuse before its first step. Settings that name untrusted code are listed at
    the end, but the code is not read. If `run.model` is such a setting, parameters and memory are left out.

    Raises:
        ShoestringError: training would refuse the run before its first step.
    """
    # All ranks are assumed to run on one host; checking needs no process group.
    world = arrange_mesh(World(size=workers, local_size=workers), run.features)
    check_named_files(run)
    completed = run.completed(world)
    model = "" if "run.model" in completed.unread else completed.settings.model
    sequence = sequence_of(completed.data, model, completed.model)
    completed = replace(completed, data=replace(completed.data, sequence=sequence))
    yield completed.toml
    occupied = check_claim(completed)
    run = completed if run.unread else within_budget(completed, world)
    check_form(run)
    with TemporaryDirectory(prefix="shoestring-check-") as folder:
        seen = DataPreview(None, {}) if "run.data" in run.unread else preview(run, Path(folder), workers)
        code = import_user_code(run, skip=run.unread)
        if seen.data:
            data = replace(seen.data, collate=code.collate)
            seen, run = replace(seen, data=data), replace(run, settings=with_steps(run.settings, data))
        job = _job(run, code, world, seen)
        sample = sample_bytes(seen.data.train[0]) if seen.data else 2 * 8 * run.data.sequence
        check_loading(job, run.settings, sample)
        check_evaluations(run.settings, seen.data, code.evaluate)
        check_resume(run)
        known = "run.model" not in run.unread
        yield "order of application:"
        for seam, feature in order_of_application(attachments_of(job).features):
            why = feature.explain(attachments_of(job)) if known else ""
            yield f"  {seam.name:6} {feature.name}{'  (' + why + ')' if why else ''}"
        if known:
            yield _parameters(job)
        if run.unread:
            yield from _left_out(run)
        else:
            yield from _memory(job, micro_batch(run.settings, world), run, seen.data)
        yield "what a setting does: shoestring keys NAME"
        yield from occupied  # last, because the user has to act on it


def _job(run: Run, code: UserCode, world: World, seen: DataPreview) -> Job:
    """Build the run's job on the meta device, and run all checks. If the code of `run.model` is not trusted, the job's
    model is an empty module."""
    progress = progress_of(run.settings) if seen.data or not run.settings.epochs else Progress()
    if "run.model" in run.unread:
        job = Job(nn.Module(), progress=progress, world=world)
        attachments_of(job).features = resolve_all(run.features, world)
        check_owners(attachments_of(job).features)
        return job
    with torch.device("meta"):
        model = code.model.build(seen.model_arguments)
    example = _example(micro_batch(run.settings, world), run, seen.data)
    job = Job(model, code.forward, code.loss, progress=progress, world=world, example=example)
    return compose(job, run.features, dry=True)


def _example(samples: int, run: Run, data: DataSets | None) -> Callable[[], Batch] | None:
    """A function that returns a batch with the sizes of a micro-batch; None if they are unknown without the data."""
    if data is not None:
        return partial(example_batch, data, samples)
    tokens = torch.empty(samples, run.data.sequence, dtype=torch.int64, device="meta")
    batch = {"inputs": tokens, "targets": tokens, "ids": tokens[:, 0]}
    return (lambda: batch) if run.data.form == "text" else None


def _left_out(run: Run) -> Iterator[str]:
    yield f"not looked at, because `{run.origin.place}` names code that nobody has vouched for:"
    for key, value in run.unread.items():
        yield f"  {key if key.startswith('run.') else f'[{key}]'}: {value}"
    model = "the model, what features say of it, and " if "run.model" in run.unread else ""
    yield f"{model}the memory of a step are left out with it; to have all: shoestring trust {run.origin.place}"


def _parameters(job: Job) -> str:
    adding = [feature.name for feature in attachments_of(job).features if feature.adds_parameters]
    more = f", without those that {', '.join(adding)} will add" if adding else ""
    return f"parameters: {sum(p.numel() for p in attachments_of(job).parameters):,}{more}"


def _memory(job: Job, micro: int, run: Run, data: DataSets | None) -> Iterator[str]:
    attachments = attachments_of(job)
    for feature in attachments.features:
        if splits_replicas(feature) and not isinstance(feature, Plannable) and splitting([feature], job.world):
            yield f"memory: as {feature.name} says above"
            return
    own = data if data is not None and data.corpus is None else None
    batch, shape = own.first_batch(micro) if own else None, (micro, run.data.sequence)
    lines = _memory_of_parts if splitting(attachments.features, job.world) else _memory_of_whole
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True  # it prints a traceback, but the message below is enough
    try:
        told = [*lines(attachments, run, batch, shape)]
    except ShoestringError:  # a feature refuses the job; it would do so in training too
        raise
    except Exception as error:  # features and models that need real values of tensors may raise any error
        log.debug("the memory of a step cannot be predicted", exc_info=error)
        told = [f"memory: not predicted ({type(error).__name__} in a step without numbers; --debug shows where)"]
    finally:
        logger.disabled = before
    yield from told


def _memory_of_whole(attachments: Attachments, run: Run, batch: Batch, shape: tuple[int, int]) -> Iterator[str]:
    """Yield lines with the predicted memory of ranks that hold whole models, or equal shards of one."""
    predicted = predict(
        attachments.module,
        attachments.features,
        attachments.loss,
        shape,
        ranks=attachments.world.size,
        accumulate=run.settings.accumulate,
        forward=attachments.forward,
        batch=batch,
    )
    held = predicted.window.by_kind()
    state = sum(held.get(kind, 0) for kind in ("parameter", "buffer", "gradient", "optimizer state"))
    yield f"weights, gradients and optimizer state of a rank at its peak: {figures.memory(state)}"
    yield f"activations of a rank for {shape[0]} samples, and all else: {figures.memory(predicted.peak - state)}"
    yield f"sum for a rank: {figures.memory(predicted.peak)}, predicted from its operators"
    yield "  " + ", ".join(
        f"{kind} {figures.memory(nbytes)}" for kind, nbytes in sorted(held.items(), key=lambda item: -item[1])
    )
    if predicted.host:
        yield f"host memory for what is offloaded, beside it: {figures.memory(predicted.host)}"
    if predicted.unseen:
        yield f"  without what {', '.join(predicted.unseen)} may take"
    yield from _room(predicted.peak, predicted.host, attachments.world.size, advice(attachments, held))


def _memory_of_parts(attachments: Attachments, run: Run, batch: Batch, shape: tuple[int, int]) -> Iterator[str]:
    """Yield lines with the predicted memory of ranks that hold different parts of the model."""
    world, settings = attachments.world, run.settings
    name = splitting(attachments.features, world)[0]
    features = as_trained(attachments.features, attachments.module, world)  # before its tensors become fake
    costs, device = measure_sizes(attachments, batch, shape), device_type()
    step, _ = planned_step(world, features, costs, batch=settings.batch, micro=settings.accumulate, device=device)
    stages = peaks(step)
    most = figures.memory(int(max(stages)))
    yield f"sum for a rank: {most}, predicted from the sizes of its tensors, because {name} splits the model"
    if len(stages) > 1:
        yield "  " + ", ".join(f"stage {stage} {figures.memory(int(peak))}" for stage, peak in enumerate(stages))
    yield from _room(max(stages), 0, world.size, "shoestring plan finds splits that fit")


def _room(peak: float, host: float, ranks: int, advised: str) -> Iterator[str]:
    """If the run does not fit into this machine's memory, yield a line that says what to change.

    Args:
        peak, host: bytes of a rank on its device, and in host memory.
    """
    if torch.cuda.is_available():
        needed, there, what = peak, torch.cuda.get_device_properties(0).total_memory, "this GPU"
    else:
        needed, there, what = (
            peak + host,
            free_memory() / ranks,
            "this host's free memory" + (f" for each of {ranks} ranks" if ranks > 1 else ""),
        )
    if needed > there:
        yield f"it does not fit into {what}, {figures.memory(there)}; {advised}"
