"""What the system reports of this host and process: cores, free memory, peak memory, pressure, and out-of-memory
kills."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
_KIB = 1024


class _Group(NamedTuple):
    """The files of a cgroup that report its memory: limit, use, droppable cache, and kills."""

    limit: str
    used: str
    cache: str
    """A line of `memory.stat`."""
    kills: str


_GROUPS = {
    "": _Group("memory.max", "memory.current", "inactive_file", "memory.events"),  # version 2
    "memory": _Group("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
}


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Bound:
    """What bounds the memory of some processes: their host, or a cgroup (v1 or v2)."""

    key: str
    """The same in every process that it bounds: "host", or the device and inode of the cgroup's folder."""
    folder: Path
    total: int
    """Bytes."""
    _files: _Group | None = None

    def free(self) -> int:
        """Bytes that are free now; file caches count as free.

        Raises:
            OSError, ValueError, KeyError: the system does not report it, or no longer.
        """
        if self._files is None:
            return int(_table(self.folder / "proc/meminfo")["MemAvailable:"]) * _KIB
        cache = int(_table(self.folder / "memory.stat")[self._files.cache])
        return self.total - int((self.folder / self._files.used).read_text()) + cache

    def pressure(self) -> float:
        """Percent of the last ten seconds in which a process waited for memory; 0 where nothing reports it."""
        with suppress(OSError, ValueError, KeyError):
            path = "memory.pressure" if self._files else "proc/pressure/memory"
            return float(_table(self.folder / path)["some"].removeprefix("avg10="))
        return 0.0


def memory_bounds(root: Path = ROOT) -> Iterator[Bound]:
    """Yield what bounds the memory of this process: its host, then its cgroups that have a limit."""
    with suppress(OSError, KeyError, ValueError):
        yield Bound("host", root, int(_table(root / "proc/meminfo")["MemTotal:"]) * _KIB)
    for folder, group in _groups(root):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            found = folder.stat()
            yield Bound(f"{found.st_dev}:{found.st_ino}", folder, int((folder / group.limit).read_text()), group)


def free_memory(root: Path = ROOT) -> float:
    """Return the free bytes of this host and of this process's cgroups (v1 or v2), whichever is less; inf if unknown.

    File caches count as free.
    """
    left = []
    for bound in memory_bounds(root):
        with suppress(OSError, ValueError, KeyError):
            left.append(bound.free())
    return max(0, min(left, default=math.inf))


def peak_above_now(root: Path = ROOT) -> int:
    """Return by how many bytes the peak exceeds present use: activations are freed between steps, and will return."""
    with suppress(OSError, KeyError, ValueError):
        status = _table(root / "proc/self/status")
        return max(0, int(status["VmHWM:"]) - int(status["VmRSS:"])) * _KIB
    return 0


def forget_peak(root: Path = ROOT) -> None:
    """Restart the count of the peak from now, if the system allows that."""
    with suppress(OSError):
        (root / "proc/self/clear_refs").write_text("5")


def kills_for_memory(root: Path = ROOT) -> int:
    """Count the processes killed so far because memory ran out: in this process's cgroups, or else on its host."""
    kills = []
    for folder, group in _groups(root):
        with suppress(OSError, ValueError, KeyError):
            kills.append(int(_table(folder / group.kills)["oom_kill"]))
    with suppress(OSError, ValueError, KeyError):
        kills = kills or [int(_table(root / "proc/vmstat")["oom_kill"])]
    return max(kills, default=0)


def _groups(root: Path) -> Iterator[tuple[Path, _Group]]:
    """Yield the folder of each cgroup that limits this process, from its own to the root; some may not be mounted."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kind, path = line.split(":", 2)
            if group := _GROUPS.get(kind):
                folder = root / "sys/fs/cgroup" / kind / path.strip("/")
                for each in (folder, *folder.parents[: len(Path(path.strip("/")).parts)]):
                    yield each, group


def _table(path: Path) -> Mapping[str, str]:
    """Map the first word of each line to the second."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
