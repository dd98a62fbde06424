"""What the system says of this host and this process: how much memory is free, and what was killed for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
_KIB = 1024


class _Group(NamedTuple):
    """The files of a cgroup that say of its memory: its limit, its use, what of that can be dropped, and its kills."""

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
    """Bytes that are left to this process now: of its host, and of its cgroups (v1 or v2); inf where nothing says.

    Caches of files count as left.
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
    """Bytes that this process had at its peak and has not now: between two steps activations are gone, to come back."""
    with suppress(OSError, KeyError, ValueError):
        said = _table(root / "proc/self/status")
        return max(0, int(said["VmHWM:"]) - int(said["VmRSS:"])) * _KIB
    return 0


def forget_peak(root: Path = ROOT) -> None:
    """Let the peak be counted from now on, where the system allows that."""
    with suppress(OSError):
        (root / "proc/self/clear_refs").write_text("5")


def kills_for_memory(root: Path = ROOT) -> int:
    """Processes that were killed because memory ran out, so far: in this process's cgroups, or else on its host."""
    found = []
    for folder, group in _groups(root):
        with suppress(OSError, ValueError, KeyError):
            found.append(int(_table(folder / group.kills)["oom_kill"]))
    with suppress(OSError, ValueError, KeyError):
        found = found or [int(_table(root / "proc/vmstat")["oom_kill"])]
    return max(found, default=0)


def _groups(root: Path) -> Iterator[tuple[Path, _Group]]:
    """The folder of each cgroup that limits this process, from its own to the root; some may not be mounted."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kind, path = line.split(":", 2)
            if group := _GROUPS.get(kind):
                folder = root / "sys/fs/cgroup" / kind / path.strip("/")
                for each in (folder, *folder.parents[: len(Path(path.strip("/")).parts)]):
                    yield each, group


def _table(path: Path) -> Mapping[str, str]:
    """The second word of each line by the first."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
