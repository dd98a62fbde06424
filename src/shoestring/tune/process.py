"""A trial as a process: how it begins, the metrics that it writes, and its end with the worker that started it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from shoestring.forking import ForkServer

LOG = "trial.log"
SIGKILL_WITH_PARENT = (1, signal.SIGKILL, 0, 0, 0)
"""Arguments of prctl."""


class TrialServer:
    """Forks trials from a process that has imported what they need, so that a trial begins at once; close it after use.

    Args:
        preloaded: names of the modules that are imported.
    """

    def __init__(self, preloaded: Sequence[str]) -> None:
        self.preloaded = preloaded
        self._server: ForkServer | None = None

    def fork(self, function: Callable[..., Any], arguments: Sequence[Any], log: int) -> tuple[ForkServer, int]:
        """Start a process in a session of its own that calls a function of a module; its server and its id."""
        if self._server is None or self._server.ended:
            # A process that has asked the driver cannot fork users of a GPU; imports that ask are to ask NVML instead.
            self._server = ForkServer(self.preloaded, more={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
        called = f"{function.__module__}:{function.__qualname__}"
        return self._server, self._server.fork(begin, [self._server.pid, called, *arguments], log)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()


def begin(server: int, called: str, *arguments: Any) -> None:
    """The forked process's part.

    The kernel kills it when its server ends, which ends with its worker: a trial does not train beside the one that
    resumes it.
    """
    ctypes.CDLL(None).prctl(*SIGKILL_WITH_PARENT)
    if os.getppid() != server:  # it has ended already
        sys.exit(1)
    os.setsid()
    module, _, name = called.partition(":")
    sys.exit(getattr(import_module(module), name)(*arguments))


class TrialProcess:
    """One attempt of a trial, which writes metrics.jsonl to `folder`.

    Args:
        function: of a module, that trains and returns the exit code.
        arguments: of the function, of JSON types.
        metric: key of the metric that `read` returns.
    """

    def __init__(
        self, server: TrialServer, function: Callable[..., Any], arguments: Sequence[Any], folder: Path, metric: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.metric, self.step = folder, metric, 0
        self.tokens, self._counted = 0.0, time.time()  # of this attempt: rows of earlier ones are older
        self.seen: set[str] = set()
        self._metrics: IO[bytes] | None = None
        with (folder / LOG).open("ab") as log:
            self._server, self.pid = server.fork(function, arguments, log.fileno())
        self._status: int | None = None

    @property
    def place(self) -> str:
        """Host, process and start time, by which `end_former` finds the process again."""
        return f"{socket.gethostname()} {self.pid} {_start_time(self.pid)}"

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self._status is None:
            with suppress(TimeoutError):
                self._status = self._wait(0.0)
        return self._status

    def _wait(self, timeout: float | None = None) -> int:
        try:
            return self._server.wait(self.pid, timeout)
        except (ProcessLookupError, RuntimeError):  # the server was killed, and the trial with it
            return -signal.SIGKILL

    def read(self) -> dict[int, float]:
        """Values of the metric, by step, that were written since the last call; a half-written row waits."""
        found: dict[int, float] = {}
        self._follow(self.folder / "metrics.jsonl")
        while self._metrics is not None:
            at = self._metrics.tell()
            line = self._metrics.readline()
            if not line.endswith(b"\n"):
                self._metrics.seek(at)
                break
            with suppress(ValueError, KeyError, TypeError):  # a row that a crash has cut
                row = json.loads(line)
                self.seen |= set(row)
                self.step = max(self.step, int(row["step"]))
                self._count(row)
                if isinstance(row.get(self.metric), int | float):
                    found[int(row["step"])] = float(row[self.metric])
        return found

    def _count(self, row: Mapping[str, float]) -> None:
        rate = row.get("tokens_per_second", row.get("samples_per_second"))
        if rate is not None and row["time"] > self._counted:
            self._counted = row["time"]
            self.tokens += rate * row["step_seconds"]

    def _follow(self, path: Path) -> None:
        """Open the file, and again from its beginning where a run has replaced it or cut rows off."""
        with suppress(FileNotFoundError):
            now = path.stat()
            if self._metrics is not None:
                then = os.fstat(self._metrics.fileno())
                if (then.st_dev, then.st_ino) == (now.st_dev, now.st_ino) and self._metrics.tell() <= now.st_size:
                    return
                self._metrics.close()
            self._metrics = path.open("rb")

    def ask_to_stop(self) -> None:
        """SIGTERM: the run writes a checkpoint after its step and ends."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and those that it has started, and wait for it."""
        if self.poll() is None:
            _kill(self.pid)
            self._status = self._wait()

    def close(self) -> None:
        self.kill()
        if self._metrics is not None:
            self._metrics.close()

    def last_words(self) -> str:
        """The last line of the trial's log that says something."""
        lines = (self.folder / LOG).read_text(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith("hint:")]
        return said[-1].removeprefix("error: ")[:300] if said else "it printed nothing"


def end_former(place: str, timeout: float = 10.0) -> None:
    """Kill the process of a lost lease if it is on this host, where it may hold the run's locks although stopped."""
    host, _, rest = place.partition(" ")
    if host != socket.gethostname() or " " not in rest:
        return
    pid, started = rest.split(" ")
    until = time.monotonic() + timeout
    while _start_time(int(pid)) == started and time.monotonic() < until:
        _kill(int(pid))
        time.sleep(0.01)


def _kill(pid: int) -> None:
    """End a trial and what it has started; at its very beginning it has no session of its own yet."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of a process, which tell it from a later one with its number; "" if ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
