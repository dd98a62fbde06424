"""Times real steps with the settings of a plan."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import filterfalse
from statistics import median

from shoestring.core.job import Job
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.planner.measure import writes_files
from shoestring.run import Run
from shoestring.training.build import build_job, build_loader
from shoestring.training.data_loading import DataSets, to_device
from shoestring.training.user_code import UserCode

STEPS = 4
"""Number of steps to time; the first is not counted, because it also allocates the optimizer's state."""


def for_trial(run: Run, world: World) -> Run:
    """The completed run without features that a trial must not run."""
    completed = run.completed(world)
    return replace(completed, features=tuple(filterfalse(writes_files, completed.features)))


def start(run: Run, code: UserCode, world: World, data: DataSets, stack: ExitStack) -> tuple[Job, list[float]]:
    """Build the job of a run and do `STEPS` steps; returns the job and the seconds of each step. A collective."""
    job = stack.enter_context(build_job(run, code, world, data, stack.enter_context(Trace(rank=world.rank))))
    loader = build_loader(job, data, run.settings, run.data.workers, run.data.absent)
    stack.callback(loader.close)
    batches, times = iter(loader), list[float]()
    job.model.train()
    for _ in range(STEPS):
        micro = [to_device(batch, world.device) for batch in next(batches)]
        world.barrier()
        began = time.perf_counter()
        job.step(*micro)
        world.barrier()
        times.append(time.perf_counter() - began)
    return job, times


def time_plan(run: Run, code: UserCode, world: World, data: DataSets) -> float:
    """Median duration, in seconds, of a plan's steps on this rank, without the first step. A collective."""
    with ExitStack() as stack:
        _, times = start(for_trial(run, world), code, world, data, stack)
    return median(times[1:])
