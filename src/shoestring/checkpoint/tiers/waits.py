"""Waiting with an end: whoever waits says for what, and is told so when it does not come.

What this package waits for, and what ends each wait:

- work on another thread: `result_of`, which gives up after `PATIENCE` and the time that its bytes take;
- other ranks: the timeout of the process group, which `RankGroup` takes from the run's own. Destroying a group waits
  only for exchanges that have begun, and each of those ends by that timeout;
- locks: `Files.lock` polls for `WAIT` seconds; a lock on a new file beside another (`storage.whole`) is not waited for;
- the process that computes checksums: `ChecksumProcess` gives it up, and they are computed here;
- a GPU: only the threads here wait for one (`Stager`); the training thread waits for them by `result_of`;
- a mount that does not answer: no program can interrupt that. Weights and optimizer state are written on a
  `BackgroundThread`, so that training is told by `result_of`. The training thread itself opens and renames small files
  only: the lock and the history when a run starts, and the history again after it could not be written.

A thread that is stuck keeps no process from ending: see `BackgroundThread`.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from shoestring.core.errors import CheckpointError

T = TypeVar("T")
PATIENCE = 600.0  # seconds for work on this host, beside what its bytes take
SLOWEST = 1e6  # bytes a second: below that a disk or a memory counts as stuck


def result_of(work: Future[T], what: str, nbytes: int = 0, patience: float | None = None) -> T:
    """The result of work on another thread.

    Args:
        what: names the work in the error, such as "sealing a checkpoint".
        nbytes: that the work reads or writes; each megabyte allows it one second more.
        patience: seconds that it may take besides; `PATIENCE` by default, and more where it waits for other ranks.

    Raises:
        CheckpointError: the work did not end in time. Or whatever the work raised.
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


class BackgroundThread:
    """A thread that does what it is given, one after the other.

    A process that ends lets it finish for `PATIENCE` seconds at most. The threads of an executor would be waited for
    without an end, so that a device that is stuck would keep the process, and the job of a batch system, alive.
    """

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Do some work after what was given before; what it returns or raises is in the future."""
        future = Future[T]()

        def do() -> None:
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(do)
        return future

    def stop(self, what: str, nbytes: int = 0, patience: float | None = None) -> None:
        """End the thread once it has done all that it was given; see `result_of`. It may have ended before."""
        if self._thread.is_alive():
            result_of(self.submit(lambda: None), what, nbytes, patience)
            self._end()
        atexit.unregister(self._end)

    def _end(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and with it what it holds: the tensors of a checkpoint


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what an exchange was for, in the error that torch raises where it fails or takes too long."""
    try:
        yield
    except RuntimeError as error:
        raise type(error)(f"waiting for {what}: {error}") from error  # its kind says that an exchange failed
