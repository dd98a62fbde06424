"""Computes the CRC-32 checksum of each chunk of some bytes.

If the package is installed with the extra `fast`, Intel's ISA-L computes the checksums, in a sixth of zlib's time. Both
libraries release Python's global interpreter lock during the computation. `ChecksumProcess` runs this file as a program
that computes the checksums of files, so this file does not import torch.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from shoestring.lifetime import end_after

if TYPE_CHECKING:
    from torch import Tensor

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["CHUNK", "crc32", "sums"]

CHUNK = 4 << 20  # number of bytes that one checksum covers


def sums(data: Tensor, threads: int = 1) -> list[int]:
    """Compute the checksum of each chunk of `data` (uint8, 1-d) with the given number of threads."""
    return _sums(data.numpy().data, threads)


def _sums(view: memoryview, threads: int) -> list[int]:
    chunks = [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]
    per_thread = -(-len(chunks) // threads)
    if per_thread == len(chunks):
        return _marks(chunks)
    with ThreadPoolExecutor(threads) as pool:  # one task per thread, because tasks have overhead
        runs = [chunks[first : first + per_thread] for first in range(0, len(chunks), per_thread)]
        return [mark for marks in pool.map(_marks, runs) for mark in marks]


def _marks(chunks: Sequence[memoryview]) -> list[int]:
    return [crc32(chunk) for chunk in chunks]


def answers(requests: Iterable[str]) -> Iterator[str]:
    """Answer each request with a line of JSON: the checksums of the first bytes of a file, or an error message.

    A request is a JSON list of path, device, inode, number of bytes, and number of threads.
    """
    for request in requests:
        path, *identity, nbytes, threads = json.loads(request)
        answer: list[int] | str
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if [status.st_dev, status.st_ino] != identity:
                    raise OSError(f"`{path}` has been replaced by another file")
                with mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
                    answer = _sums(view, threads)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter than the request
            answer = str(error)
        yield json.dumps(answer)


if __name__ == "__main__":
    # Standard input may stay open when the parent ends, if other children of the parent hold the pipe.
    end_after(os.getppid(), lambda: os._exit(0))
    with suppress(BrokenPipeError):
        for answer in answers(sys.stdin):
            print(answer, flush=True)
