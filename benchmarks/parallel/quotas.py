"""Cgroups that hold the processes of each virtual host to a part of the machine's processors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000  # microseconds


@contextmanager
def processor_quotas(hosts: int) -> Iterator[str]:
    """Give each host an equal part of the processors; yields the groups' path without the host's number.

    A process joins the group of its host by writing "0" to the group's `cgroup.procs`.
    """
    version_1 = _ROOT / "cpu"
    root = version_1 if version_1.is_dir() else _ROOT
    quota = int(_PERIOD * (os.cpu_count() or 1) / hosts)
    prefix = root / f"shoestring-{os.getpid()}"
    groups = [Path(f"{prefix}-{host}") for host in range(hosts)]
    try:
        for group in groups:
            group.mkdir()
            if root == version_1:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
        yield str(prefix)
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()
