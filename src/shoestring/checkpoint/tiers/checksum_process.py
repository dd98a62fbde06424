"""Checksums by a process of its own.

Threads of the training process take the interpreter's lock once for every chunk, which a training thread that launches
work for a GPU feels: a checkpoint of 19 GB has 4,500 chunks.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.checkpoint.format import checksum

PATIENCE = 30.0  # seconds for an answer, beside what its bytes take
SLOWEST = 1e8  # bytes a second
_END = 5.0  # seconds for the process to end


class ChecksumProcess:
    """Computes the checksums of files in shared memory in a child process, which ends with this one.

    What is in no file, and what that process cannot read or does not answer for, is computed here.

    Args:
        threads: of that process, or of this one.
        child: whether there is one; on a CPU training and checksums share the processors anyway.
    """

    def __init__(self, threads: int, *, child: bool = True) -> None:
        self.threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._works = child and bool(sys.executable) and not getattr(sys, "frozen", False)

    def sums(self, data: Tensor, file: tuple[Path, int, int] | None) -> list[int]:
        """The checksum of each chunk of bytes (uint8, 1-d), the first of a file of this path, device and inode."""
        if self._works and file is not None and len(data):
            try:
                answer = self._ask([str(file[0]), *file[1:], len(data), self.threads], PATIENCE + len(data) / SLOWEST)
            except (OSError, ValueError):
                answer = None
                self.close()
            if isinstance(answer, list) and len(answer) == -(-len(data) // checksum.CHUNK):
                return answer
        return checksum.sums(data, self.threads)

    def _ask(self, request: list[object], seconds: float) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", checksum.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a signal from the terminal is for the training process, which ends this one
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        end, answer, descriptor = time.monotonic() + seconds, b"", self._process.stdout.fileno()
        while not answer.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            if not (piece := os.read(descriptor, 1 << 16)):
                raise ConnectionError("the process has ended")
            answer += piece
        return json.loads(answer)

    def close(self) -> None:
        """End the process, and start none any more."""
        process, self._process, self._works = self._process, None, False
        if process is None:
            return
        process.terminate()  # it holds nothing
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:  # it is stopped, say
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it was told last cannot be written
                    pipe.close()
