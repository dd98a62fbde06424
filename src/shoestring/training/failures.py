"""Handle failures that come from outside the program: a full disk, too little memory, a signal."""

from __future__ import annotations

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
from shoestring.core.job import Job, attachments_of
from shoestring.memory.exhausted import explain
from shoestring.storage.whole import DISK_ERRORS

log = logging.getLogger("shoestring")


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Context that turns failures to write files, such as a full disk, into a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str(error).partition("I/O error: ")[2] if isinstance(error, SafetensorError) else error.strerror
        if not reason or (isinstance(error, OSError) and error.errno not in DISK_ERRORS):
            raise
        raise CheckpointError(
            f"cannot write in `{path}`: {reason}", hint="earlier checkpoints are intact; free space, then resume"
        ) from error


@contextmanager
def enough_memory(job: Job) -> Iterator[None]:
    """Context that turns an out-of-memory error into an error that names the largest use and a setting to lower it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        held, hint = explain(attachments_of(job), error)
        raise ShoestringError(
            f"out of memory on {job.world.device} at step {job.progress.step + 1}: {held}", hint=hint
        ) from error


@contextmanager
def stop_on_signals(job: Job) -> Iterator[None]:
    """Context in which the first SIGINT, SIGTERM or SIGUSR1 stops the job on all ranks after the same step.

    A checkpoint is written at the end of that step. Every rank enters the context, in its main thread. After a SIGINT,
    further signals have their usual effect, so a second Ctrl-C ends the process at once. After a SIGTERM or SIGUSR1,
    further SIGTERMs and SIGUSR1s are ignored: batch systems send the signal to every process and torchrun forwards its
    own copy, so a worker gets two or three within milliseconds. To end a process that hangs, batch systems and torchrun
    send SIGKILL after a grace period.
    """
    poll = Poll(job)
    attachments_of(job).at(Phase.CLIP, poll.ask)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
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
    """Lets ranks agree on when to stop in a user's own training loop, which never calls `Job.step`.

    `Job.step` sums the votes to stop together with the loss. `Poll` instead starts an all-reduce of the votes in each
    step and reads the previous step's result, which has arrived by then, so that no rank waits.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.stop = job, False
        self._votes: tuple[Tensor, dist.Work] | None = None

    def ask(self) -> None:
        """Start to sum this step's votes over ranks, and read the previous step's sum; called in Phase.CLIP."""
        world = self.job.world
        if "loss" in self.job.numbers:  # `Job.step` was called, which sums the votes itself
            return
        if world.size == 1:
            attachments_of(self.job).stopping |= self.stop
            return
        if self._votes is not None:
            votes, work = self._votes
            work.wait()
            attachments_of(self.job).stopping |= float(votes) > 0
        on_cpu = "gloo" in dist.get_backend_config()
        votes = torch.tensor(float(self.stop), device="cpu" if on_cpu else world.device)
        self._votes = votes, cast(dist.Work, dist.all_reduce(votes, async_op=True))
