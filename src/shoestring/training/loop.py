"""The loop: data, steps, evaluation, and an orderly end. Everything else is a feature at a seam."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.trace import Trace, span
from shoestring.core.world import World
from shoestring.data.loader import Loader
from shoestring.models.saving import remember
from shoestring.report.recorder import Recorder
from shoestring.report.sinks import Sink, newest_step
from shoestring.run import Run
from shoestring.training import finish, run_folder
from shoestring.training.budget import within_budget
from shoestring.training.build import build_job, build_loader
from shoestring.training.data_loading import open_data, to_device, with_steps
from shoestring.training.evaluation import Evaluations
from shoestring.training.failures import enough_memory, stop_on_signals, writable
from shoestring.training.newest_rows import NewestRows
from shoestring.training.throughput import Meter

log = logging.getLogger("shoestring")

PACE_STEPS = 12  # steps after which the pace is known well enough to set the number of steps
REPLAN = 10  # steps between corrections of that pace, in the first half of the run


def train(
    run: Run,
    world: World,
    record: Recorder | None = None,
    *,
    sinks: Sequence[Sink] = (),
    stop: Callable[[], bool] | None = None,
) -> finish.Result:
    """Run `run` on this rank of `world`; every rank calls it, from any thread.

    Args:
        record: notes when the run begins, and how it fails.
        sinks: get the metrics of each step on the first rank, beside those that `run.sinks` names. The run closes them;
            one that raises gets no more metrics.
        stop: asked on every rank before each step; once it is true on any, the run ends after that step, as after a
            signal: with a last checkpoint, so that it can be resumed.

    Raises:
        ShoestringError: on all ranks, for whatever the user can mend; what was saved before is intact.
    """
    run = within_budget(run.completed(world), world)
    with ExitStack() as stack:
        path = Path(world.decide(lambda: str(run_folder.claim(run, stack))))
        # Each host may have a disk of its own.
        world.agree(lambda: run_folder.check_same(path, run) if world.local_rank == 0 else None)
        run = run.placed(path)
        stack.enter_context(writable(path))
        data = open_data(run, world, path)
        stack.callback(data.close)
        run = with_steps(run, data)
        world.agree(lambda: remember(run.settings.model, path) if world.local_rank == 0 else None)
        trace = stack.enter_context(Trace(rank=world.rank, host=world.host))
        job = stack.enter_context(build_job(run, world, data, trace))
        data.answer_calls(job)
        if record is not None:
            facts = {"name": run.name, "ranks": world.size, "parameters": job.trace.parameters}
            record.begin(path, world.rank, lambda: job.progress.step, **facts)
        loader = build_loader(run, job, data)
        stack.callback(loader.close)
        job.keep("loader", loader)
        save_best = partial(finish.export, job, run, data, path / "best")
        evaluations = world.agree(lambda: Evaluations(job, run, data, save_best))
        newest = NewestRows(job)
        resumed = _resume(job, run)
        if record is not None and resumed is not None:
            record.resumed()
        reached = newest_step(path / "metrics.jsonl")
        meter = stack.enter_context(finish.open_meter(job, run, data, path, newest, sinks))
        for line in (*finish.opening(job, run, data, path), *finish.repeated(resumed, reached)):
            log.info(line)
        if threading.current_thread() is threading.main_thread():  # others cannot take signals
            stack.enter_context(stop_on_signals(job))
        world.barrier()
        trace.align()
        with enough_memory(job):
            seconds = _loop(job, loader, meter, run, evaluations, stop)
            return finish.close(job, run, data, path, seconds, meter, evaluations)


def _resume(job: Job, run: Run) -> int | None:
    """The step that was resumed from, if any."""
    resume = run.settings.resume
    if resume is False:
        return None
    if job.restore is None:
        raise ConfigError("`run.resume` is set, but no feature writes checkpoints", hint="add [checkpoint.plain]")
    step = job.restore(resume if isinstance(resume, str) else "auto")
    if step is None and resume is True:
        raise CheckpointError(
            "`run.resume` is true, but there is no checkpoint", hint='"auto" starts where there is none'
        )
    if not run.settings.minutes:
        job.progress.gain = 1.0  # of a run by the clock, which this one continues
    return step


def _loop(
    job: Job, loader: Loader, meter: Meter, run: Run, evaluations: Evaluations, stop: Callable[[], bool] | None
) -> float:
    """Train until the total, a signal or `stop`; the seconds it took."""
    job.model.train()
    evaluations.after_step(meter.write)
    batches, began = iter(loader), time.perf_counter()
    first = job.progress.step
    while not job.done:
        with span("data", "wait") as waiting:
            micro = [to_device(batch, job.world.device) for batch in next(batches)]
        meter.waited += time.perf_counter() - waiting.began
        if stop is not None and stop():
            job.stop()
        meter.step(job.step(*micro))
        done = job.progress.step - first
        if run.settings.minutes and (done == PACE_STEPS or (done % REPLAN == 0 and _early(job.progress))):
            left = max(run.settings.minutes * 60 - (time.perf_counter() - began), 0.0)
            plan(job.progress, job.world.decide(lambda left=left: max(1, int(left / meter.seconds_per_step))))
        evaluations.after_step(meter.write)
    job.world.agree(job.verify)
    return time.perf_counter() - began


def _early(progress: Progress) -> bool:
    return 2 * progress.position < progress.total


def plan(progress: Progress, steps: int) -> None:
    """End after this many more steps, so that training takes about `run.minutes`.

    The first plan sets the total. Later ones keep it, and say how much of it a step is worth, so that schedules go
    faster or slower from where they are, and never jump.
    """
    progress.total = progress.total or progress.step + steps
    progress.gain = (progress.total - progress.position) / steps
