"""Waiting with an end: whoever waits says for what, and is told so when it does not come."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from shoestring.core.errors import CheckpointError

T = TypeVar("T")
PATIENCE = 600.0  # seconds for work on this host, beside what its bytes take
SLOWEST = 1e6  # bytes a second: below that a disk or a memory counts as stuck


def result_of(work: Future[T], what: str, nbytes: int = 0, patience: float | None = None) -> T:
    """The result of work on another thread.

    Args:
        what: is waited for, in words.
        nbytes: that the work reads or writes.
        patience: seconds that it may take without those; some exchanges' where it waits for other ranks.

    Raises:
        CheckpointError: it did not come; or whatever the work raised.
    """
    limit = (PATIENCE if patience is None else patience) + nbytes / SLOWEST
    try:
        return work.result(limit)
    except TimeoutError as error:
        if work.done():  # its own
            raise
        raise CheckpointError(
            f"{what} did not end in {limit:.0f} s", hint="see whether a disk, a mount or a GPU is stuck"
        ) from error


def stop(thread: ThreadPoolExecutor, what: str, nbytes: int = 0, patience: float | None = None) -> None:
    """End a thread once it has done all that it was given; see `result_of`."""
    try:
        last = thread.submit(lambda: None)
    except RuntimeError:  # it has ended before
        return
    result_of(last, what, nbytes, patience)
    thread.shutdown()  # nothing is left for it to do


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what an exchange was for, in the error that torch raises where it fails or takes too long."""
    try:
        yield
    except RuntimeError as error:
        raise type(error)(f"waiting for {what}: {error}") from error  # its kind says that an exchange failed
