"""Failures from outside of a run: a full disk, too little memory, a signal."""

from __future__ import annotations

import errno
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.memory.exhausted import explain

log = logging.getLogger("shoestring")


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn a disk that is full or gone into an error of the run; what is written at once stays whole."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str(error).partition("I/O error: ")[2] if isinstance(error, SafetensorError) else error.strerror
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
        if not reason or (isinstance(error, OSError) and error.errno not in numbers):
            raise
        raise CheckpointError(
            f"cannot write in `{path}`: {reason}", hint="earlier checkpoints are intact; free space, then resume"
        ) from error


@contextmanager
def enough_memory(job: Job) -> Iterator[None]:
    """Turn running out of memory into an error that names what was largest, and the knob that lowers it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        held, hint = explain(job, error)
        raise ShoestringError(
            f"out of memory on {job.world.device} at step {job.progress.step + 1}: {held}", hint=hint
        ) from error


@contextmanager
def stop_on_signals(job: Job) -> Iterator[None]:
    """Stop the job at the first SIGINT or SIGTERM: `job.stopping` turns true on all ranks after the same step.

    Features save at the end of that step. Every rank calls this, from its main thread. After a SIGINT, all signals take
    their usual course. SIGTERM never takes it: a batch system sends it to every process, and torchrun hands its own
    on, so that a worker gets two or three within milliseconds. To end at once, send SIGKILL, as both do
    after a while.
    """
    poll = Poll(job)
    job.at(Phase.CLIP, poll.ask)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked = False

    def restore(*numbers: signal.Signals) -> None:
        for number in numbers:
            signal.signal(number, before[number])

    def stop(number: int, _: object) -> None:
        nonlocal asked
        again, asked = asked, True
        if again:
            return
        job.stop()
        poll.stop = True
        restore(*(before if number == signal.SIGINT else (signal.SIGINT,)))
        log.info("%s: ending after this step, and saving", signal.Signals(number).name)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore(*before)


class Poll:
    """Lets the ranks of a loop that never calls `Job.step`, where votes travel with the loss, agree on a stop.

    Votes of one step are read at the next one, so that nobody waits for them.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.stop = job, False
        self._votes: tuple[Tensor, dist.Work] | None = None

    def ask(self) -> None:
        """Work for Phase.CLIP."""
        world = self.job.world
        if "loss" in self.job.numbers:  # `Job.step` was called
            return
        if world.size == 1:
            self.job.stopping |= self.stop
            return
        if self._votes is not None:
            votes, work = self._votes
            work.wait()
            self.job.stopping |= float(votes) > 0
        on_cpu = "gloo" in dist.get_backend_config()
        votes = torch.tensor(float(self.stop), device="cpu" if on_cpu else world.device)
        self._votes = votes, cast(dist.Work, dist.all_reduce(votes, async_op=True))
