"""What the system reports of this host and process: free memory, peak memory, and out-of-memory kills."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
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


def free_memory(root: Path = ROOT) -> float:
    """Return the free bytes of this host and of this process's cgroups (v1 or v2), whichever is less; inf if unknown.

    File caches count as free.
    """
    try:
        left = [int(_table(root / "proc/meminfo")["MemAvailable:"]) * _KIB]
    except (OSError, KeyError, ValueError):
        return math.inf
    for folder, group in _groups(root):
        with suppress(OSError, ValueError, KeyError):  # "max" is no number: no limit
            cache = int(_table(folder / "memory.stat")[group.cache])
            left.append(int((folder / group.limit).read_text()) - int((folder / group.used).read_text()) + cache)
    return max(0, min(left))


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
