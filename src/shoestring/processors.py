"""Determines how many processors this process may use, on which the numbers of threads and ranks depend."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def processors(root: Path = ROOT) -> int:
    """Return the number of processors that this process may use, at least 1.

    The number is limited by the process's affinity (taskset, cpusets) and by the CPU quotas of its cgroups (`docker run
    --cpus`, limits in Kubernetes, CPUQuota in systemd). Fractions are rounded up, since 1.5 processors need two
    threads.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the number of processors that each cgroup's quota allows; cgroups without a quota are skipped."""
    for folder, controllers in cgroups(root):
        # A cgroup without a limit has the quota "max" in version 2, which is not a number, and -1 in version 1.
        with suppress(OSError, ValueError):
            if not controllers:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            elif "cpu" in controllers:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                continue
            if quota > 0 < period:
                yield quota / period


def cgroups(root: Path = ROOT) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder and the controllers of each cgroup that this process is in, from its own to the root.

    The controllers are () for version 2, which has one hierarchy for all controllers. A folder may not exist: inside a
    container, the cgroup's path is that on the host, but the container sees its cgroup as the root.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            mounted = root / "sys/fs/cgroup" / names
            for depth in range(len(parts := Path(path.strip("/")).parts), -1, -1):
                yield mounted.joinpath(*parts[:depth]), tuple(filter(None, names.split(",")))
