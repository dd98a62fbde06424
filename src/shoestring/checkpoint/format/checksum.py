"""CRC-32 of chunks of bytes.

Where the extra `fast` is installed, Intel's ISA-L computes it, which takes a sixth of zlib's time. Both let go of the
interpreter's lock while they do. Run as a program (`ChecksumProcess`) this file computes the checksums of files; it
imports no torch.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["CHUNK", "crc32", "sums", "threads_beside"]

CHUNK = 4 << 20  # bytes that one checksum is of


def sums(data: Tensor, threads: int = 1) -> list[int]:
    """The checksum of each chunk of bytes (uint8, 1-d), by so many threads."""
    return _sums(data.numpy().data, threads)


def _sums(view: memoryview, threads: int) -> list[int]:
    chunks = [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]
    each = -(-len(chunks) // threads)
    if each == len(chunks):
        return _marks(chunks)
    with ThreadPoolExecutor(threads) as pool:  # with a run of chunks each, for handing one over takes time, too
        runs = [chunks[first : first + each] for first in range(0, len(chunks), each)]
        return [mark for marks in pool.map(_marks, runs) for mark in marks]


def _marks(chunks: Sequence[memoryview]) -> list[int]:
    return [crc32(chunk) for chunk in chunks]


def threads_beside(ranks: int) -> int:
    """How many threads each of so many ranks of a host may use beside training: a quarter of its share of processors.

    Every chunk takes the interpreter's lock once. More threads do so more often than a training thread that launches
    work for a GPU can bear.
    """
    return max(1, len(os.sched_getaffinity(0)) // (4 * ranks)) if hasattr(os, "sched_getaffinity") else 1


def answers(requests: Iterable[str]) -> Iterator[str]:
    """A line for each request, a JSON list (path, device, inode, bytes, threads): the checksums of a file's first
    bytes, or why there are none."""
    for request in requests:
        path, *identity, nbytes, threads = json.loads(request)
        try:
            yield json.dumps(_sums_of_file(path, identity, nbytes, threads))
        except (OSError, ValueError) as error:  # a mapping that would be longer than its file
            yield json.dumps(str(error))


def _sums_of_file(path: str, identity: Any, nbytes: int, threads: int) -> list[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != identity:
            raise OSError(f"`{path}` is another file now")
        with mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
            return _sums(view, threads)
    finally:
        os.close(descriptor)


def _end_with(parent: int) -> None:
    """Its other children may hold this process's input open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with suppress(BrokenPipeError):
        for answer in answers(sys.stdin):
            print(answer, flush=True)
