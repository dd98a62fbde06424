"""Start of a run: open its metric sinks, and log its first lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch

from shoestring import figures
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.models.gpt import GPT
from shoestring.models.quantized import rounded_parameters
from shoestring.report.console import Console
from shoestring.report.findings import Findings
from shoestring.report.sinks import JsonLines, Sink, evaluations_of, newest_step
from shoestring.report.trackers import Opener, Tracker
from shoestring.run import Run
from shoestring.training.data_loading import DataSets
from shoestring.training.newest_rows import NewestRows
from shoestring.training.throughput import Meter

log = logging.getLogger("shoestring")

FEW_STEPS = 60
"""Number of optimizer steps below which the log suggests more steps, if `run.epochs` sets the length of the run."""


def begin(
    job: Job,
    run: Run,
    data: DataSets,
    folder: Path,
    newest: NewestRows,
    openers: Mapping[str, Opener],
    resumed: int | None,
    stack: ExitStack,
) -> Meter:
    """Open the throughput meter of a run, and log the first lines of the run. A collective.

    Args:
        openers: name of a sink -> function that opens the sink, for all sinks but the console and metrics.jsonl.
        resumed: step of the checkpoint that the run was resumed from; None if it starts from scratch.
        stack: closes the meter.
    """
    reached = newest_step(folder / "metrics.jsonl")  # before the rows of steps after the checkpoint are removed
    meter = stack.enter_context(_open_meter(job, run, data, folder, newest, openers))
    attachments = attachments_of(job)
    changed = (feature.explain_resume(attachments) for feature in attachments.features if job.progress.step)
    for line in chain(opening(job, run, data, folder), repeated(resumed, reached), filter(None, changed)):
        log.info(line)
    return meter


def _open_meter(
    job: Job, run: Run, data: DataSets, folder: Path, newest: NewestRows, openers: Mapping[str, Opener]
) -> Meter:
    """Open the throughput meter; on the first rank it writes to the sinks of the run. A collective."""
    attachments = attachments_of(job)

    def open_sinks() -> list[Sink]:
        step, file = job.progress.step, folder / "metrics.jsonl"
        continues = file.exists()  # otherwise this is a new run that starts from another run's checkpoint
        rows, findings = JsonLines(file), Findings(folder)
        rows.truncate_after(step)
        findings.truncate_after(step)
        if continues:
            newest.write_missing(rows)
        sinks: list[Sink] = [Console(lambda: total_steps(job.progress)), findings, rows]
        for name, opener in openers.items():
            sinks.append(Tracker(name, opener, folder, folder.resolve().name, run.document, step))
        return sinks

    sinks = job.world.agree(lambda: open_sinks() if job.world.first else [])
    model = attachments.module
    # 6 floating-point operations per parameter and token: 2 in the forward pass, 4 in the backward pass.
    flops = model.flops_per_token(run.data.sequence) if isinstance(model, GPT) else 6 * job.trace.parameters
    # If a feature at LOSS changed the loss, the loss is not the cross-entropy, so it does not give bits per byte.
    bits = data.bits(held_out=False) if attachments.loss is attachments.task_loss else 0.0
    meter = Meter(job, sinks, flops, bits, run.settings.batch)
    newest.unwritten = meter.unwritten
    meter.evaluated = evaluations_of(folder / "metrics.jsonl", job.progress.step)
    return meter


def total_steps(progress: Progress) -> int:
    """Number of steps of the whole run if the gain per step stays the same; 0 if the total is not known."""
    left = max(progress.total - progress.position, 0.0) / progress.gain
    return progress.step + math.ceil(left - 1e-6) if progress.total else 0


def opening(job: Job, run: Run, data: DataSets, folder: Path) -> Iterator[str]:
    """Log lines at the start of a run: its ranks, data, model, and features with the reasons for their choices."""
    world, settings, threads = job.world, run.settings, torch.get_num_threads()
    device = f"CPU with {threads} thread{'s' * (threads > 1)} a rank (no GPU found)"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    yield f"{run.name} in {folder}"
    yield f"{world.size} rank{'s' * (world.size > 1)} on {world.hosts} host{'s' * (world.hosts > 1)}, {device}"
    if data.corpus is not None:
        corpus = data.corpus
        unit = "documents" if run.data.form == "text" else "records"
        learnt = "" if run.data.form == "text" else " of answers to learn"
        yield (
            f"data: {' + '.join(run.sources)}, {corpus.documents:,} {unit}, {figures.size(corpus.bytes)}{learnt}, "
            f"{figures.count(corpus.train.tokens)} tokens to train on, vocabulary {corpus.vocab_size}"
        )
        yield from (f"  {note}" for note in corpus.train.notes)
    length = f"{settings.minutes:g} minutes" if settings.minutes else f"{settings.steps} steps"
    total = sum(parameter.numel() for parameter in attachments_of(job).named().values()) + rounded_parameters(
        attachments_of(job).module
    )
    trained = f", {_count(job.trace.parameters)} of them trained" if job.trace.parameters < total else ""
    yield f"model: {settings.model}, {_count(total)} parameters{trained}; {length} of {settings.batch} samples"
    if settings.epochs and settings.steps < FEW_STEPS:
        more = " or --batch 1 --accumulate 1" if settings.batch > 1 and world.size == 1 else ""
        enough = math.ceil(settings.epochs * FEW_STEPS / settings.steps)
        yield f"  {settings.steps} steps are few: --epochs {enough}{more} makes more of them"
        if rate := next((f"--{feature.name}.lr" for feature in run.features if hasattr(feature, "lr")), ""):
            yield f"  a small model also learns more from each at a higher {rate}"
    for feature in attachments_of(job).features:
        why = feature.explain(attachments_of(job))
        yield f"  {feature.name}{': ' + why if why else ''}"


def _count(number: int) -> str:
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number:,}"


def repeated(resumed: int | None, reached: int) -> Iterator[str]:
    """A log line: the step that the run resumes from, and how many steps it will repeat.

    Args:
        resumed: step of the checkpoint; None if there was no checkpoint.
        reached: last step that the run did before it ended; 0 for a new run.
    """
    begun = resumed or 0
    lost = max(reached - begun, 0)
    again = f"{lost} step{'s are' if lost > 1 else ' is'} repeated, up to {reached}" if lost else ""
    if resumed is not None:
        yield f"resumed from step {begun}" + (f"; {again}" if again else "")
    elif again:
        yield f"there was no checkpoint: {again}"
