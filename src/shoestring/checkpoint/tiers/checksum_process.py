"""Checksums by a process of its own.

Threads of the training process take the interpreter's lock once for every chunk, which a training thread that launches
work for a GPU feels: a checkpoint of 19 GB has 4,500 chunks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from shoestring.checkpoint.format import checksum

PATIENCE = 5.0  # seconds for it to end, which it does when its input ends


class ChecksumProcess:
    """Where files in this host's memory are read by another process, which ends with this one.

    What is in no file, or what that process cannot read, is computed here.

    Args:
        threads: of that process, or of this one.
        apart: whether there is one; on a CPU training and checksums share the processors anyway.
    """

    def __init__(self, threads: int, *, apart: bool = True) -> None:
        self.threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._works = apart and bool(sys.executable)

    def sums(self, data: Tensor, file: tuple[Path, int, int] | None) -> list[int]:
        """The checksum of each chunk of bytes (uint8, 1-d), with which a file of this path, device and inode begins."""
        if self._works and file is not None and len(data):
            try:
                answer = self._ask([str(file[0]), *file[1:], len(data), self.threads])
            except (OSError, ValueError):
                answer, self._works = None, False
                self.close()
            if isinstance(answer, list) and len(answer) == -(-len(data) // checksum.CHUNK):
                return answer
        return checksum.sums(data, self.threads)

    def _ask(self, request: list[object]) -> object:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", checksum.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a signal from the terminal is for the training process, which ends this one
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=PATIENCE)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
