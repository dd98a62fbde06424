"""A trial as a process: its command, the metrics that it writes, and its end with the worker that started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

LOG = "trial.log"
# The kernel kills the trial when its worker dies, so that it does not train beside the one that resumes it.
_BEGIN = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class TrialProcess:
    """One attempt of a trial, which writes metrics.jsonl to `folder`. Start it from a thread that outlives it.

    Args:
        metric: key of the metric that `read` returns.
    """

    def __init__(self, command: Sequence[str], folder: Path, metric: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.metric, self.step = folder, metric, 0
        self.tokens, self._counted = 0.0, time.time()  # of this attempt: rows of earlier ones are older
        self.seen: set[str] = set()
        self._metrics: IO[bytes] | None = None
        with (folder / LOG).open("ab") as log:
            begin = [sys.executable, "-c", _BEGIN, str(os.getpid()), *command]
            self._process = subprocess.Popen(begin, stdout=log, stderr=log, start_new_session=True)

    @property
    def place(self) -> str:
        """Host, process and start time, by which `end_former` finds the process again."""
        return f"{socket.gethostname()} {self._process.pid} {_start_time(self._process.pid)}"

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

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
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process and those that it has started, and wait for it."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

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
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of a process, which tell it from a later one with its number; "" if ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
