"""A thread that runs tasks one after the other. Waiting for a task has a timeout; the error after the timeout names the
task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

import torch

from shoestring.core.errors import PeerError, ShoestringError

log = logging.getLogger("shoestring")

T = TypeVar("T")
COMPUTING = 60.0  # seconds that a task may compute, in addition to its wait for other ranks


class WorkerTask(Generic[T]):
    """One task of a worker.

    Args:
        what: name of the task in error messages, such as "the exchange of `w` at step 3".
        limit: seconds that the task may wait for other ranks.
    """

    def __init__(self, what: str, limit: float) -> None:
        self.what, self.limit = what, limit + COMPUTING
        self._future: Future[T] = Future()
        self._done: torch.Event | None = None  # recorded at the end of the task's work on an accelerator

    def result(self) -> T:
        """Wait for the task and for the work that it queued on the device; returns the task's result.

        Raises:
            PeerError: the task has not finished in time. Errors of the task itself are raised again.
        """
        try:
            result = self._future.result(self.limit)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise PeerError(
                f"{self.what} has not finished in {self.limit:g} s", hint="is another rank stuck?"
            ) from error
        if self._done is not None:
            self._done.wait()
        return result

    def run(self, work: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        try:
            result = work()
        except BaseException as error:  # raised again by `result`
            self._future.set_exception(error)
            return
        self._done = stream.record_event() if stream is not None else None
        self._future.set_result(result)

    @classmethod
    def completed(cls, result: T) -> Self:
        """Create a task that has already finished with `result`."""
        task = cls("", 0.0)
        task._future.set_result(result)
        return task


class Worker:
    """A thread that runs tasks in the order of their submission, without autograd.

    On a GPU, the worker has its own stream, where each task waits for the work that the caller of `submit` had queued
    on its own stream before. Without a thread, the caller of `submit` runs the task itself.
    """

    def __init__(self, name: str, device: torch.device, *, threaded: bool = True) -> None:
        self.device, self.closed = device, False
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and threaded else None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True) if threaded else None
        self._newest: WorkerTask | None = None
        if self._thread is not None:
            self._thread.start()

    def submit(self, task: WorkerTask[T], work: Callable[[], T]) -> WorkerTask[T]:
        """Run `work` on the thread; the result of `work` becomes the result of `task`.

        Raises:
            ShoestringError: the worker is closed.
        """
        if self.closed:
            raise ShoestringError(f"{task.what} was started after its job was closed")
        self._newest = task
        # The worker's stream must not read tensors that the caller's stream has not written yet.
        ready = torch.cuda.current_stream(self.device).record_event() if self.stream is not None else None

        def run() -> None:
            with torch.no_grad(), torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                if ready is not None:
                    ready.wait()
                task.run(work, self.stream)

        if self._thread is None:
            run()
        else:
            self._queue.put(run)
        return task

    def close(self) -> bool:
        """End the thread once the submitted tasks are done. Logs a warning and returns False if the tasks do not finish
        in time."""
        self.closed = True
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(self._newest.limit if self._newest is not None else COMPUTING)
        if not self._thread.is_alive():
            return True
        log.warning("comm: %s has not finished, and is abandoned", self._newest and self._newest.what)
        return False

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:  # `close` puts None into the queue
            work()
