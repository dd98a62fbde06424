"""The training loop: load data, do steps, evaluate, and finish. Features do everything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.trace import Trace, span
from shoestring.core.world import World
from shoestring.data.clients import ClientLoader
from shoestring.data.loader import Loader
from shoestring.models.saving import remember
from shoestring.report.recorder import Recorder
from shoestring.report.sinks import Sink
from shoestring.run import Run, Settings
from shoestring.training import finish, run_folder
from shoestring.training.build import build_job, build_loader, keep_loader
from shoestring.training.choices import within_budget
from shoestring.training.clock import TrainingClock
from shoestring.training.data_loading import open_data, sequence_of, to_device, with_steps
from shoestring.training.evaluation import Evaluations
from shoestring.training.failures import enough_memory, stop_on_signals, writable
from shoestring.training.newest_rows import NewestRows
from shoestring.training.same_run import check_ranks
from shoestring.training.saved_memory import predicted_savings
from shoestring.training.start import begin
from shoestring.training.throughput import Meter
from shoestring.training.user_code import import_user_code


def train(
    run: Run,
    world: World,
    record: Recorder | None = None,
    *,
    sinks: Sequence[Sink] = (),
    stop: Callable[[], bool] | None = None,
) -> finish.Result:
    """Train a run on this rank of `world`. Every rank must call this function, from any thread.

    Args:
        record: recorder that records the start of the run, and its failure if the run fails.
        sinks: additional sinks for metrics, besides those that `run.sinks` names; used only on the first rank. The run
            closes these sinks. If a sink raises an error, the run continues without that sink.
        stop: function that every rank calls before each step. If `stop` returns True on any rank, the run ends after
            that step and writes a last checkpoint, from which it can be resumed.

    Raises:
        ShoestringError: the user can correct the cause; raised on all ranks. Earlier checkpoints are intact.
    """
    check_ranks(run.document, world)
    run = run.completed(world)
    sequence = world.decide(lambda: sequence_of(run.data, run.settings.model, run.model))
    run = replace(run, data=replace(run.data, sequence=sequence))
    with ExitStack() as stack:
        path = Path(world.decide(lambda: str(run_folder.claim(run, stack))))
        # If hosts do not share a disk, the folder of the same name on another host may hold another run.
        world.agree(lambda: run_folder.check_same(path, run.document) if world.local_rank == 0 else None)
        stack.enter_context(writable(path))
        run = within_budget(run, world, path)
        code = world.agree(lambda: import_user_code(run, skip=() if world.first else ("run.sinks",)))
        data = open_data(run, world, path, code)
        stack.callback(data.close)
        settings = with_steps(run.settings, data)
        run = replace(run, settings=settings, features=tuple(feature.placed(path) for feature in run.features))
        world.agree(lambda: remember(settings.model, path) if world.local_rank == 0 else None)
        trace = stack.enter_context(Trace(rank=world.rank, host=world.host))
        job = stack.enter_context(build_job(run, code, world, data, trace))
        data.answer_calls(job)
        if record is not None:
            facts = {"name": run.name, "ranks": world.size, "parameters": job.trace.parameters}
            record.begin(path, world.rank, lambda: job.progress.step, **facts)
        loader = build_loader(job, data, settings, run.data.workers, run.data.absent)
        stack.callback(loader.close)
        keep_loader(job, loader, data)
        save = partial(finish.export, job, finish.describe_export(code.model, data, path))
        evaluations = world.agree(lambda: Evaluations(job, settings, data, code.evaluate, partial(save, path / "best")))
        newest = NewestRows(job)
        clock = TrainingClock(job, settings)
        # Resuming restores only the states that were already passed to `keep`, so it must follow the last `keep`.
        resumed = _resume(job, settings)
        if record is not None and resumed is not None:
            record.resumed()
        clock.count_earlier_starts(path, resumed)
        openers = dict(code.sinks)
        for number, sink in enumerate(sinks):
            openers[f"{type(sink).__name__} ({number})"] = lambda _folder, _title, _settings, sink=sink: sink
        meter = begin(job, run, data, path, newest, openers, resumed, stack)
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only in this thread
            stack.enter_context(stop_on_signals(job))
        world.barrier()
        trace.align()
        savings = stack.enter_context(predicted_savings(run, world))
        with enough_memory(job):
            seconds = _loop(job, loader, meter, clock, evaluations, stop)
            return finish.close(job, run, data, path, seconds, meter, evaluations, save, savings)


def _resume(job: Job, settings: Settings) -> int | None:
    """Load the checkpoint that `run.resume` asks for; return its step, or None if the run starts from scratch."""
    resume = settings.resume
    if resume is False:
        return None
    if job.restore is None:
        raise ConfigError("`run.resume` is set, but no feature writes checkpoints", hint="add [checkpoint.plain]")
    step = job.restore(resume if isinstance(resume, str) else "auto")
    if step is None and resume is True:
        raise CheckpointError(
            "`run.resume` is true, but there is no checkpoint", hint='with "auto" the run then starts from scratch'
        )
    if not settings.minutes:
        job.progress.gain = 1.0  # the checkpoint may hold the gain of a run that `run.minutes` limited
    return step


def _loop(
    job: Job,
    loader: Loader | ClientLoader,
    meter: Meter,
    clock: TrainingClock,
    evaluations: Evaluations,
    stop: Callable[[], bool] | None,
) -> float:
    """Train until the last step, a signal or `stop`; return the duration in seconds."""
    job.model.train()
    evaluations.after_step(meter.write_evaluation)
    batches, began = iter(loader), time.perf_counter()
    clock.start()
    while not job.done:
        with span("data", "wait") as waiting:
            micro = [to_device(batch, job.world.device) for batch in next(batches)]
        meter.waited += time.perf_counter() - waiting.began
        if stop is not None and stop():
            job.stop()
        clock.begin_step()
        meter.step(job.step(*micro))
        clock.end_step(meter)
        evaluations.after_step(meter.write_evaluation)
    job.world.agree(attachments_of(job).verify)  # on an accelerator, the last step's loss is still to be checked
    return time.perf_counter() - began
