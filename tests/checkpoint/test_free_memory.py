"""What the system says is free: of the host, and of cgroups of both versions."""

import pytest

from shoestring.checkpoint.budget import free_memory

NAMES = {"memory": ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), "": ("max", "current", "inactive_file")}
GIB = 1 << 30


def system(root, available, groups, lines):
    """A /proc and a /sys below `root`; groups are (kind, path) -> (limit, used, cached), in bytes."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {available >> 10} kB\n")
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    for (kind, path), (limit, used, cached) in groups.items():
        folder = root / "sys/fs/cgroup" / kind / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(NAMES[kind], (limit, used), strict=False):
            (folder / f"memory.{name}").write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{NAMES[kind][2]} {cached}\n")
    return free_memory(root)


@pytest.mark.parametrize("kind", NAMES)
def test_the_tightest_of_the_host_and_all_groups_counts(tmp_path, kind):
    line = f"4:{kind}:/a/b" if kind else "0::/a/b"
    groups = {(kind, ""): (40 * GIB, 0, 0), (kind, "a"): (9 * GIB, 4 * GIB, 2 * GIB), (kind, "a/b"): (8 * GIB, GIB, 0)}
    others = ["3:cpu,cpuacct:/a", "1:name=systemd:/a"]
    assert system(tmp_path / "1", 32 * GIB, groups, [*others, line]) == 7 * GIB
    tighter = groups | {(kind, "a"): (8 * GIB, 4 * GIB, 2 * GIB)}
    assert system(tmp_path / "2", 32 * GIB, tighter, [*others, line]) == 6 * GIB  # a cache of files is not in the way
    assert system(tmp_path / "3", 5 * GIB, groups, [*others, line]) == 5 * GIB
    full = groups | {(kind, ""): (GIB, 2 * GIB, 0)}
    assert system(tmp_path / "4", 32 * GIB, full, [*others, line]) == 0


def test_no_limit_and_a_group_that_is_not_mounted_here(tmp_path):
    assert system(tmp_path / "1", GIB, {("", "a"): ("max", 0, 0)}, ["0::/a"]) == GIB
    container = {("memory", ""): (GIB // 2, 0, 0)}  # it sees its own group as the root, and the host's path of it
    assert system(tmp_path / "2", GIB, container, ["4:memory:/docker/0123"]) == GIB // 2
    assert free_memory(tmp_path / "nothing") == float("inf")


def test_this_host_says_something():
    assert 0 < free_memory() < 1 << 50
