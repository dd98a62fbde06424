"""Provides waits with a time limit. If a wait takes too long, the error names the awaited work.

The package waits for the following things, and each wait has the limit stated here:

- work on another thread: `result_of` gives up after `PATIENCE` seconds, plus extra time for large data;
- other ranks: the timeout of the process group, which `RankGroup` takes from the run's process group. Destroying a
  group waits only for exchanges that have begun, and the same timeout applies to these;
- locks: `Files.lock` polls for `WAIT` seconds; `storage.whole` does not wait for locks;
- the process that computes checksums: `ChecksumProcess` ends the process, and computes the checksums itself;
- a GPU: only background threads wait for it (`Stager`); the training thread waits for these threads by `result_of`;
- a mount that does not answer: no program can interrupt such a wait. Weights and optimizer state are written on a
  `BackgroundThread`, so `result_of` raises an error in the training thread. The training thread itself only opens and
  renames small files: the lock and the history when a run starts, and the history again if it could not be written.

A stuck thread does not prevent its process from ending; see `BackgroundThread`.
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
PATIENCE = 600.0  # seconds for work on this host, in addition to the time that `SLOWEST` allows for its bytes
SLOWEST = 1e6  # minimum speed in bytes/s; a slower disk or memory counts as stuck


def result_of(work: Future[T], what: str, nbytes: int = 0, patience: float | None = None) -> T:
    """Wait for work on another thread, and return its result.

    Args:
        what: name of the work in the error, such as "sealing a checkpoint".
        nbytes: bytes that the work reads or writes; each megabyte allows one more second.
        patience: seconds that the work may take beside the time for its bytes; defaults to `PATIENCE`. Work that waits
            for other ranks needs more patience.

    Raises:
        CheckpointError: the work did not end in time. Any exception of the work is raised again.
    """
    limit = (PATIENCE if patience is None else patience) + nbytes / SLOWEST
    try:
        return work.result(limit)
    except TimeoutError as error:
        if work.done():  # the work itself raised a TimeoutError
            raise
        raise CheckpointError(
            f"{what} did not end in {limit:.0f} s", hint="see whether a disk, a mount or a GPU is stuck"
        ) from error


class BackgroundThread:
    """A thread that executes submitted functions one after the other.

    At the end of the process, Python waits for this thread for at most `PATIENCE` seconds. For an executor's threads,
    the wait would have no limit, so a stuck device would keep the process and its batch job alive.
    """

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue a call of `work`; the future holds its result or its error."""
        future = Future[T]()

        def do() -> None:
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(do)
        return future

    def stop(self, what: str, nbytes: int = 0, patience: float | None = None) -> None:
        """Wait for all queued work as `result_of` does, and end the thread; does nothing if the thread has already
        ended."""
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
            del work  # `work` holds references to the tensors of a checkpoint


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Context manager that adds the purpose of an exchange to the error that torch raises if the exchange fails or
    times out."""
    try:
        yield
    except RuntimeError as error:
        raise type(error)(f"waiting for {what}: {error}") from error  # callers rely on the type
