"""What befalls a run from outside: a full disk, too little memory, a signal."""

from __future__ import annotations

import errno
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.core.job import Job

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
            f"cannot write in `{path}`: {reason}", hint="earlier saves are intact; free space, then resume"
        ) from error


@contextmanager
def enough_memory(job: Job) -> Iterator[None]:
    """Turn running out of memory into an error that names the knobs."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ShoestringError(
            f"out of memory on {job.world.device} at step {job.progress.step + 1}",
            hint="raise run.accumulate, lower run.batch or data.sequence, or add [memory.recompute]",
        ) from error


@contextmanager
def ended_by_signals(job: Job) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run after the current step; after a SIGINT, all take their usual course.

    SIGTERM never takes it: a batch system sends it to every process, and torchrun hands its own on, so that a worker
    gets two or three within milliseconds. Whoever does not want to wait sends SIGKILL, as both do after a while.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    told = False

    def restore(*numbers: signal.Signals) -> None:
        for number in numbers:
            signal.signal(number, before[number])

    def stop(number: int, _: object) -> None:
        nonlocal told
        again, told = told, True
        if again:
            return
        job.stop()
        restore(*(before if number == signal.SIGINT else (signal.SIGINT,)))
        log.info("%s: ending after this step, and saving", signal.Signals(number).name)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore(*before)
