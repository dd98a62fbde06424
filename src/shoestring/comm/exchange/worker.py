"""A thread that does one task after the other, and the wait for a task: never without an end, and it names the task."""

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
COMPUTING = 60.0  # seconds that a task may compute, beside what it waits for other ranks


class Task(Generic[T]):
    """Something that a worker does.

    Args:
        what: for the error, such as "the exchange of `w` at step 3".
        limit: seconds that it may wait for other ranks.
    """

    def __init__(self, what: str, limit: float) -> None:
        self.what, self.limit = what, limit + COMPUTING
        self._future: Future[T] = Future()
        self._done: torch.Event | None = None  # on an accelerator, when what it wrote may be read

    def result(self) -> T:
        """Wait for it, and for the device's work that it started.

        Raises:
            PeerError: it has not ended in time. Or what the task itself raised.
        """
        try:
            result = self._future.result(self.limit)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise PeerError(f"{self.what} has not ended in {self.limit:g} s", hint="is another rank stuck?") from error
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
    def of(cls, result: T) -> Self:
        """One that has ended."""
        task = cls("", 0.0)
        task._future.set_result(result)
        return task


class Worker:
    """A thread that does tasks in the order in which they are submitted, without gradients.

    On a GPU it has a stream of its own, and each task begins when what was asked of the device before is done. Without
    a thread, whoever submits a task does it.
    """

    def __init__(self, name: str, device: torch.device, *, threaded: bool = True) -> None:
        self.device, self.closed = device, False
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and threaded else None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True) if threaded else None
        self._newest: Task | None = None
        if self._thread is not None:
            self._thread.start()

    def submit(self, task: Task[T], work: Callable[[], T]) -> Task[T]:
        """Let `work` be done; its result is the task's.

        Raises:
            ShoestringError: the worker is closed.
        """
        if self.closed:
            raise ShoestringError(f"{task.what} was started after its job was closed")
        self._newest = task
        ready = torch.cuda.current_stream(self.device).record_event() if self.stream is not None else None

        def do() -> None:
            with torch.no_grad(), torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                if ready is not None:
                    ready.wait()
                task.run(work, self.stream)

        if self._thread is None:
            do()
        else:
            self._queue.put(do)
        return task

    def close(self) -> bool:
        """End the thread after what was submitted; False, and a warning, where that does not end in time."""
        self.closed = True
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(self._newest.limit if self._newest is not None else COMPUTING)
        if ended := not self._thread.is_alive():
            return ended
        log.warning("comm: %s is still under way, and left to itself", self._newest and self._newest.what)
        return ended

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:  # woken by `submit` and `close`; waits for nobody else
            work()
