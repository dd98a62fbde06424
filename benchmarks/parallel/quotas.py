"""Cgroups that hold the processes of each virtual host to a part of the machine's processors, and of its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 4_000
"""Microseconds in which a host gets its part of the processors. With the usual 100,000 a host may stand still for 50 ms
once it has used its part, as no real host does, and with it the hosts that wait for its messages; passes of a few
milliseconds are then fast or slow by whether the host has waited before. Shorter periods than this cost processor time
by themselves."""
_CONTROLLERS = ("cpu", "memory")


def _roots() -> list[Path]:
    """Folders of the controllers: one each in version 1 of cgroups, and one for all in version 2."""
    version_1 = [_ROOT / name for name in _CONTROLLERS]
    return version_1 if version_1[0].is_dir() else [_ROOT]


def join(group: str) -> None:
    """Let this process, a worker of torchrun, join the groups of its host."""
    for root in _roots():
        (root / f"{group}-{os.environ['GROUP_RANK']}" / "cgroup.procs").write_text("0")


@contextmanager
def processor_quotas(hosts: int, memory: int = 0) -> Iterator[str]:
    """Give each host an equal part of the processors; yields the name of the groups, for `join`.

    Args:
        memory: limit of a host's memory in bytes; 0 for none.
    """
    quota = int(_PERIOD * (os.cpu_count() or 1) / hosts)
    name = f"shoestring-{os.getpid()}"
    groups = [root / f"{name}-{host}" for root in _roots() for host in range(hosts)]
    settings = {
        "cpu.cfs_period_us": str(_PERIOD),
        "cpu.cfs_quota_us": str(quota),
        "cpu.max": f"{quota} {_PERIOD}",
    }
    if memory:
        settings |= {"memory.limit_in_bytes": str(memory), "memory.max": str(memory)}
    try:
        for group in groups:
            group.mkdir()
            for file, value in settings.items():
                if (group / file).exists():
                    (group / file).write_text(value)
        yield name
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()
