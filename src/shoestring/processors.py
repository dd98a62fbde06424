"""Determines how many processors this process may use, and whether other programs compete for them; used to choose the
number of threads and ranks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

ROOT = Path("/")
SHORT_SPIN = 1000
"""Number of spin iterations (some 20 microseconds) after which a waiting OpenMP thread sleeps, used if other programs
compete for the processors."""


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

    The controllers are () for cgroup version 2, which has one hierarchy for all controllers. The folder may be missing:
    inside a container, the cgroup's path is its path on the host, but the container sees its own cgroup as the root.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            mounted = root / "sys/fs/cgroup" / names
            for depth in range(len(parts := Path(path.strip("/")).parts), -1, -1):
                yield mounted.joinpath(*parts[:depth]), tuple(filter(None, names.split(",")))


def share_processors(root: Path = ROOT) -> None:
    """Make OpenMP threads that wait for each other sleep sooner if other programs compete for the processors.

    GNU's OpenMP, which torch uses, busy-waits for some milliseconds. Busy-waiting is faster by a tenth if no other
    program runs. But two busy-waiting programs, each with as many threads as there are processors, block each other's
    work, and take three times as long as if run in sequence. Must be called before torch is imported.
    """
    if are_wanted(root):
        os.environ.setdefault("GOMP_SPINCOUNT", str(SHORT_SPIN))


def are_wanted(root: Path = ROOT, looks: int = 5) -> bool:
    """Whether this process's threads plus the threads that other programs are running now outnumber the machine's
    processors. Takes the median of `looks` measurements within 10 ms. False if the number of running threads cannot be
    read."""
    own = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(own) if own.isdecimal() and own != "0" else processors(root)
    others = []
    with suppress(OSError, ValueError):
        for look in range(looks):
            time.sleep(0.002 * (look > 0))
            entities = (root / "proc/loadavg").read_text().split()[3]  # text "running threads/all threads"
            others.append(int(entities.partition("/")[0]) - 1)  # minus the thread that reads the file
    running = sorted(others)[looks // 2] if len(others) == looks else 0
    return running > 0 and running + threads > (os.cpu_count() or threads)


def in_own_thread(work: Callable[[], T]) -> T:
    """Call `work` in a new thread that ends when `work` returns; return its result or raise its exception.

    GNU's OpenMP keeps a pool of threads for each thread that has computed in parallel. While all pools together have
    more threads than there are processors, no pool busy-waits, and decoding takes a fifth longer. A pool ends when the
    thread that it belongs to ends.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result()
