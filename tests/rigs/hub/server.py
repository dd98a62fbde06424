"""A hub served by `shoestring hub serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import until


class HubServer:
    """A hub in a folder, as a context. `kill` ends all its processes at once; `start` serves the folder again on the
    same port."""

    def __init__(self, folder: Path, *options: str, workers: int = 1) -> None:
        self.folder, self.options, self.workers = Path(folder), options, workers
        self.port, self.lines = 0, list[str]()
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        command = [sys.executable, "-m", "shoestring", "hub", "serve", str(self.folder), *self.options]
        command += ["--port", str(self.port), "--workers", str(self.workers)]
        self.lines.clear()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        until(lambda: self._said() or self._process.poll() is not None, seconds=60)
        assert self._said(), "".join(self.lines)
        self.port = int(self._said().rpartition(":")[2])
        return self

    def _said(self) -> str:
        return next((line.strip() for line in list(self.lines) if line.startswith("hub: ")), "")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.lines.extend(iter(process.stdout.readline, ""))

    def kill(self) -> None:
        """End all processes of the hub at once, as the loss of power to its machine does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signal_: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal_)
            self._process.wait(30)
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
