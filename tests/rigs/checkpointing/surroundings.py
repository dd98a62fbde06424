"""What a test puts around a run: an ear for warnings, copies of its memory and disks, a file system that gets full."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


class LogCollector(logging.Handler):
    """Collects what the user is told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What is said in the block."""
    log, listener = logging.getLogger("shoestring"), LogCollector()
    before, log.propagate = log.propagate, False
    log.addHandler(listener)
    try:
        yield listener.said
    finally:
        log.removeHandler(listener)
        log.propagate = before


def copied(place: Path, source: str, target: str) -> None:
    """Put a copy of all memory and disks in the place of another."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place / target, ignore_errors=True)
        shutil.copytree(place / source, place / target)
    dist.barrier()


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    """A file system in memory of `size` bytes; needs root.

    Raises:
        PermissionError: it cannot be mounted.
    """
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        raise PermissionError(done.stderr.decode().strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
