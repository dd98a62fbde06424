"""Computes checksums in a child process, so that the training thread is not delayed.

Threads of the training process would take the global interpreter lock (GIL) once for every chunk, and a checkpoint of
19 GB has 4,500 chunks. If other threads took the GIL so often, the training thread would launch kernels on a GPU late.
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
from shoestring.processors import processors

PATIENCE = 30.0  # seconds for an answer, in addition to the time that `SLOWEST` allows
SLOWEST = 1e8  # minimum speed in bytes/s at which checksums must be computed
_END = 5.0  # seconds to wait for the process to end


def threads_beside(ranks: int) -> int:
    """Return the number of threads that a rank may use beside training: a quarter of the rank's share of the host's
    processors.

    Threads take Python's global interpreter lock once per chunk. With more threads, the training thread would wait for
    the lock so often that it launched kernels late.

    Args:
        ranks: number of ranks on the host.
    """
    return max(1, processors() // (4 * ranks))


class ChecksumProcess:
    """Computes the checksums of files in shared memory in a child process, which ends when this process ends.

    If data is not in a file, or if the child fails, checksums are computed in this process.

    Args:
        threads: number of threads in either process.
        child: whether to use a child process, which has no benefit for training on a CPU.
    """

    def __init__(self, threads: int, *, child: bool = True) -> None:
        self.threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._works = child and bool(sys.executable) and not getattr(sys, "frozen", False)

    def sums(self, data: Tensor, file: tuple[Path, int, int] | None) -> list[int]:
        """Compute the checksum of each chunk of `data` (uint8, 1-d), which is the beginning of `file` (path, device,
        inode)."""
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
                start_new_session=True,  # Ctrl-C in the terminal must not end the child before this process
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
        """End the child process; later checksums are computed in this process."""
        process, self._process, self._works = self._process, None, False
        if process is None:
            return
        process.terminate()  # the child has nothing to save
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:  # for example, if the process is stopped
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # closing flushes the rest of the last request, which may fail
                    pipe.close()
