"""Runs a trial as a process: forks it, reads the trial's metrics, and ends the process if its worker ends."""

from __future__ import annotations

import math
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

from shoestring.core.errors import NonFiniteError
from shoestring.forking import ForkServer
from shoestring.lifetime import end_with
from shoestring.report import history_file
from shoestring.storage.foreign import parse_json
from shoestring.storage.guarded import open_regular

LOG = "trial.log"
_LONGEST = 1 << 20
"""Maximum bytes of a row of metrics, and maximum bytes that are read from the end of a log."""
_MOST_STEPS = 1 << 62


class TrialServer:
    """Forks trials from a server process that has already imported their modules, so that trials start quickly.

    Args:
        preloaded: names of the modules to import.
    """

    def __init__(self, preloaded: Sequence[str]) -> None:
        self.preloaded = preloaded
        self._server: ForkServer | None = None

    def fork(self, function: Callable[..., Any], arguments: Sequence[Any], log: int) -> tuple[ForkServer, int]:
        """Fork a process, in its own session, that calls a module-level function; return the server and the process id.

        Raises:
            RuntimeError: the server process has ended; the next call starts a new server.
        """
        if self._server is not None and self._server.ended:
            self._server.close()
            self._server = None
        if self._server is None:
            # A process that has initialized CUDA cannot fork processes that use a GPU. With this variable, torch counts
            # devices through NVML instead of initializing CUDA.
            self._server = ForkServer(self.preloaded, more={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
        called = f"{function.__module__}:{function.__qualname__}"
        try:
            return self._server, self._server.fork(begin, [self._server.pid, called, *arguments], log)
        except RuntimeError:
            self._server.close()
            raise

    def close(self) -> None:
        """End the server process."""
        if self._server is not None:
            self._server.close()


def begin(server: int, called: str, *arguments: Any) -> None:
    """Run a trial in the forked process.

    The kernel kills this process when its server ends, and the server ends together with its worker. The process of a
    trial therefore never trains at the same time as another process that resumes the trial.
    """
    end_with(server)
    os.setsid()
    module, _, name = called.partition(":")
    sys.exit(getattr(import_module(module), name)(*arguments))


class TrialProcess:
    """The process of one attempt of a trial; it writes metrics.jsonl to `folder`.

    Args:
        function: a module-level function that trains and returns the exit code.
        arguments: the function's arguments, which must have JSON types.
        metric: key of the metric that `read` returns.
    """

    def __init__(
        self, server: TrialServer, function: Callable[..., Any], arguments: Sequence[Any], folder: Path, metric: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.metric, self.step = folder, metric, 0
        self.tokens, self._counted = 0.0, time.time()  # rows before this time belong to earlier attempts
        self.seen: set[str] = set()
        self._metrics: IO[bytes] | None = None
        with (folder / LOG).open("ab") as log:
            self._server, self.pid = server.fork(function, arguments, log.fileno())
        self._status: int | None = None
        self.orphaned = False
        """Whether the server was killed, which also kills the trial."""

    @property
    def place(self) -> str:
        """Host, process id and start time of the process, by which `end_former` identifies the process."""
        return f"{socket.gethostname()} {self.pid} {_start_time(self.pid)}"

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the process; None while the process runs."""
        if self._status is None:
            with suppress(TimeoutError):
                self._status = self._wait(0.0)
        return self._status

    def _wait(self, timeout: float | None = None) -> int:
        try:
            return self._server.wait(self.pid, timeout)
        except (ProcessLookupError, RuntimeError):
            self.orphaned = True
            return -signal.SIGKILL

    def read(self) -> dict[int, float]:
        """Read the metric by step from rows written since the last call; leave a half-written row for later."""
        values: dict[int, float] = {}
        self._follow(self.folder / "metrics.jsonl")
        while self._metrics is not None:
            at = self._metrics.tell()
            line = self._metrics.readline(_LONGEST)
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST:  # too long for a row
                    continue
                self._metrics.seek(at)
                break
            with suppress(ValueError, KeyError, TypeError, OverflowError):  # a row cut short by a crash
                row = parse_json(line)
                step = int(row["step"])
                if not 0 <= step < _MOST_STEPS:
                    continue
                self.seen |= set(row)
                self.step = max(self.step, step)
                self._count(row)
                value = row.get(self.metric)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    values[step] = float(value)
        return values

    def _count(self, row: Mapping[str, float]) -> None:
        rate = row.get("tokens_per_second", row.get("samples_per_second"))
        if rate is not None and row["time"] > self._counted:
            tokens = float(rate * row["step_seconds"])
            self._counted = float(row["time"])
            self.tokens += tokens if math.isfinite(tokens) else 0.0

    def _follow(self, path: Path) -> None:
        """Open the metrics file; if a run has replaced or truncated the file, reopen it at its beginning."""
        with suppress(OSError):
            now = path.stat()
            if self._metrics is not None:
                then = os.fstat(self._metrics.fileno())
                if (then.st_dev, then.st_ino) == (now.st_dev, now.st_ino) and self._metrics.tell() <= now.st_size:
                    return
                self._metrics.close()
                self._metrics = None
            self._metrics = open_regular(path)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, after which the run completes its step, writes a checkpoint and ends."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its children, and wait until the process has ended."""
        if self.poll() is None:
            _kill(self.pid)
            self._status = self._wait()

    def close(self) -> None:
        self.kill()
        if self._metrics is not None:
            self._metrics.close()

    def last_words(self) -> str:
        """Find the reason why the process ended: the last line of its log that is neither empty nor a hint."""
        if self.orphaned:
            return "the process that starts the trials was killed"
        with (self.folder / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LONGEST))
            lines = log.read(_LONGEST).decode(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip() and not line.startswith("hint:")]
        reason = lines[-1].removeprefix("error: ")[:300] if lines else "it printed nothing"
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in reason)

    def diverged(self) -> bool:
        """Whether the run ended because its loss became NaN or infinite; its settings are assumed to be the cause."""
        cause = history_file.cause(history_file.read(self.folder))
        return cause is not None and cause.get("error") == NonFiniteError.__name__


def end_former(place: str, timeout: float = 10.0) -> None:
    """Kill a trial's former process if it is on this host, because it may be suspended and hold the run's locks."""
    host, _, rest = place.partition(" ")
    if host != socket.gethostname() or " " not in rest:
        return
    pid, started = rest.split(" ")
    until = time.monotonic() + timeout
    while _start_time(int(pid)) == started and time.monotonic() < until:
        _kill(int(pid))
        time.sleep(0.01)


def _kill(pid: int) -> None:
    """Kill a trial and its children."""
    for end in (os.killpg, os.kill):  # before `setsid`, a new trial has no process group of its own
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    """Clock ticks from boot to a process's start, to detect that its id was reused; "" if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # the fields `state` (Z: zombie, X: dead) and `starttime` of proc(5)
