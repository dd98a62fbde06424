"""Reads free memory, peak memory, memory pressure and out-of-memory kills; allocates room for temporary copies."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoestring.processors import ROOT, cgroups

_KIB = 1024
SPARE = 0.5
"""Share of the free memory that a temporary copy may take; the other ranks of a host need memory as well."""


class _Group(NamedTuple):
    """Names of the files in which a cgroup reports its memory limit, its memory use and its out-of-memory kills."""

    limit: str
    used: str
    cache: str
    """Key of the line in `memory.stat` that reports the reclaimable file cache in bytes."""
    kills: str


_GROUPS: dict[tuple[str, ...], _Group] = {
    (): _Group("memory.max", "memory.current", "inactive_file", "memory.events"),  # version 2
    ("memory",): _Group("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
}
"""Maps the controllers of a cgroup (none in version 2) to the names of the cgroup's files."""


@dataclass(frozen=True)
class Bound:
    """A limit on the memory of processes, set by the size of their host's memory or by a cgroup (v1 or v2)."""

    key: str
    """Identifier of the limit, equal in all processes: "host", or the device and inode of the cgroup's folder."""
    folder: Path
    total: int
    """The limit in bytes."""
    _files: _Group | None = None

    def free(self) -> int:
        """Return the free memory below this limit in bytes; file caches count as free.

        Raises:
            OSError, ValueError, KeyError: the system does not report free memory, or the cgroup no longer exists.
        """
        if self._files is None:
            return int(_table(self.folder / "proc/meminfo")["MemAvailable:"]) * _KIB
        cache = int(_table(self.folder / "memory.stat")[self._files.cache])
        return self.total - int((self.folder / self._files.used).read_text()) + cache

    def pressure(self) -> float:
        """Percentage of the last ten seconds in which a process waited for memory; 0 if this is not reported."""
        with suppress(OSError, ValueError, KeyError):
            path = "memory.pressure" if self._files else "proc/pressure/memory"
            return float(_table(self.folder / path)["some"].removeprefix("avg10="))
        return 0.0


def memory_bounds(root: Path = ROOT) -> Iterator[Bound]:
    """Yield the limits on this process's memory: first its host's memory, then the limits of its cgroups."""
    with suppress(OSError, KeyError, ValueError):
        yield Bound("host", root, int(_table(root / "proc/meminfo")["MemTotal:"]) * _KIB)
    for folder, group in _groups(root):
        with suppress(OSError, ValueError):  # "max" means no limit
            status = folder.stat()
            yield Bound(f"{status.st_dev}:{status.st_ino}", folder, int((folder / group.limit).read_text()), group)


def free_memory(root: Path = ROOT) -> float:
    """Return the memory that this process can still use, in bytes; infinite if unknown.

    This is the minimum of the free memory of the host and of the process's cgroups (v1 or v2). File caches count as
    free.
    """
    left = []
    for bound in memory_bounds(root):
        with suppress(OSError, ValueError, KeyError):
            left.append(bound.free())
    return max(0, min(left, default=math.inf))


def peak_above_now(root: Path = ROOT) -> int:
    """Return the bytes by which this process's peak memory exceeds its current use.

    Between steps, the difference is mostly activations, which the next step needs again.
    """
    with suppress(OSError, KeyError, ValueError):
        status = _table(root / "proc/self/status")
        return max(0, int(status["VmHWM:"]) - int(status["VmRSS:"])) * _KIB
    return 0


def return_memory() -> None:
    """Return freed memory to the operating system, if the C library can do so (glibc).

    Otherwise glibc keeps the memory of a freed model. New tensors of equal size do not fit into the freed pieces,
    because tensors are aligned. A process that frees a model and then loads a part of it would need the memory of both.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def memory_or_disk(nbytes: int, folder: Path | None) -> np.ndarray:
    """Allocate room for a temporary copy: (nbytes,) uint8, uninitialized; freed with the last view of it.

    The room is this process's own memory, or a deleted file in `folder` if the copy would take more than `SPARE` of the
    free memory. The system writes pages of such a file to disk and frees them when memory runs short, where it would
    otherwise kill the process. If the disk is full, the room is this process's own memory after all.
    """
    if folder is not None and nbytes > SPARE * free_memory():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return np.memmap(file, np.uint8, mode="r+", shape=(nbytes,))
    return np.empty(nbytes, np.uint8)


def forget_peak(root: Path = ROOT) -> None:
    """Reset this process's peak memory to its current use, if the system allows it."""
    with suppress(OSError):
        (root / "proc/self/clear_refs").write_text("5")


def kills_for_memory(root: Path = ROOT) -> int:
    """Number of out-of-memory kills so far in this process's cgroups; on its host if the cgroups do not report them."""
    kills = []
    for folder, group in _groups(root):
        with suppress(OSError, ValueError, KeyError):
            kills.append(int(_table(folder / group.kills)["oom_kill"]))
    with suppress(OSError, ValueError, KeyError):
        kills = kills or [int(_table(root / "proc/vmstat")["oom_kill"])]
    return max(kills, default=0)


def _groups(root: Path) -> Iterator[tuple[Path, _Group]]:
    """Yield the folders of the cgroups that may limit this process, from its own up to the root; some may not exist."""
    for folder, controllers in cgroups(root):
        if group := _GROUPS.get(controllers):
            yield folder, group


def _table(path: Path) -> Mapping[str, str]:
    """Read a file as a table: first word of each line -> second word."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
