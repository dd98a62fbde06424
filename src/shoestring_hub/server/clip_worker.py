"""The processes that convert clips: workers, and the process that starts them and replaces those that end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType

from django.conf import settings
from django.db import DatabaseError, close_old_connections, connections

from shoestring.lifetime import end_with
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic
from shoestring_hub.server import chunks, clip_files, clip_queue, media
from shoestring_hub.server.models import ClipJob

log = logging.getLogger("shoestring")
POLL = 1.0
"""Seconds between checks of an empty queue, and until a worker that has ended is replaced."""
RENEW = 3.0
"""Seconds between extensions of a lease."""


class LeaseLostError(Exception):
    """Another worker has taken the job, so this one's result would be refused."""


class _HeldLease:
    """A job that this worker holds, whose lease is extended as long as `tick` is called."""

    def __init__(self, job: ClipJob) -> None:
        self.job, self._progress, self._renewed = job, 0.0, time.monotonic()

    def tick(self, progress: float | None = None) -> None:
        """Extend the lease if it is time; None keeps the last progress."""
        self._progress = self._progress if progress is None else progress
        if time.monotonic() - self._renewed >= RENEW:
            if not clip_queue.renew(self.job, self._progress):
                raise LeaseLostError
            self._renewed = time.monotonic()


def work_once() -> bool:
    """Convert the next clip of the queue; False if none is due."""
    job = clip_queue.claim()
    if job is None:
        return False
    lease = _HeldLease(job)
    try:
        with _work_folder(job) as folder:
            _convert(job, folder, lease)
    except LeaseLostError:
        log.warning("clip %s: another worker has taken it", job.clip_id)
    except media.RejectedError as error:
        clip_queue.fail(job, str(error), final=True)
    except media.StoppedError as error:
        clip_queue.fail(job, str(error), final=False)
    except OSError as error:
        clip_queue.fail(job, f"the hub cannot store it: {error.strerror}", final=False)
    except SystemExit:
        clip_queue.give_back(job)
        raise
    return True


def _convert(job: ClipJob, folder: Path, lease: _HeldLease) -> None:
    clip, out = job.clip, folder / "clip" / "out"

    def source() -> Iterator[bytes]:
        for part in chunks.stream(clip.project_id, clip.chunks):
            lease.tick()
            yield part

    write_atomic(folder / "clip" / "source", source())
    facts = media.convert(folder, lease.tick)
    size = sum(path.stat().st_size for path in out.iterdir())
    names = ("video.mp4", "poster.jpg")
    video, poster = (clip_files.put(clip.project_id, out / name, folder, lease.tick) for name in names)
    shape = {"width": facts.width, "height": facts.height, "seconds": facts.seconds}
    if not clip_queue.finish(job, video=video, poster=poster, size=size, **shape):
        raise LeaseLostError


@contextmanager
def _work_folder(job: ClipJob) -> Iterator[Path]:
    """A new folder for the sandbox. Removes what earlier attempts at the same job have left."""
    root = settings.HUB.work
    root.mkdir(mode=0o700, exist_ok=True)
    for left in root.glob(f"{job.pk}-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(mkdtemp(prefix=f"{job.pk}-", dir=root))
    try:
        for name in ("root", "clip"):
            (folder / name).mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def work() -> None:
    """Convert clips until the process is ended; waits while the database cannot be reached."""
    while True:
        busy = False
        try:
            close_old_connections()
            busy = work_once()
        except DatabaseError as error:
            log.warning("clips: the database fails: %s", foreign.one_line(str(error)))
            connections.close_all()
        if not busy:
            time.sleep(POLL)


# -- processes --------------------------------------------------------------------------------------------------------


def start(count: int) -> None:
    """Start a process that keeps `count` workers running for as long as this process lives."""
    connections.close_all()  # a connection must not be used by two processes
    _fork(lambda: _supervise(count))


def _supervise(count: int) -> None:
    workers: set[int] = set()
    try:
        while True:
            while len(workers) < count:
                workers.add(_fork(work))
            ended, _ = os.wait()
            workers.discard(ended)
            time.sleep(POLL)
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)
        for _ in workers:
            with suppress(ChildProcessError):
                os.wait()


def _fork(run: Callable[[], None]) -> int:
    """Run a function in a process that is ended with its parent; returns the process' id."""
    parent = os.getpid()
    if child := os.fork():
        return child
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        end_with(parent, signal.SIGTERM)
        run()
    except SystemExit:
        pass
    except BaseException:
        log.exception("a process that converts clips has ended")
    os._exit(0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit
