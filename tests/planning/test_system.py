"""What the system says is free: of the host, and of cgroups of both versions."""

import mmap
from pathlib import Path

import pytest

from shoestring.planning import system as operating_system
from shoestring.planning.system import forget_peak, free_memory, kills_for_memory, peak_above_now

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


def test_what_a_process_had_at_its_peak_beside_what_it_has_now(tmp_path):
    assert peak_above_now(tmp_path) == 0  # nothing says
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tpython\nVmHWM:\t  5000 kB\nVmRSS:\t  2000 kB\n")
    assert peak_above_now(tmp_path) == 3000 * 1024
    forget_peak(tmp_path)
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


def test_this_process_has_had_more(tmp_path):
    forget_peak()
    if peak_above_now() > 16 << 20:
        pytest.skip("the system does not let a process forget its peak")
    with mmap.mmap(-1, 64 << 20) as large:  # not of the heap, which may have as much that is free and resident
        for page in range(0, 64 << 20, mmap.PAGESIZE):
            large[page] = 1
    assert 32 << 20 < peak_above_now() < 128 << 20


@pytest.mark.parametrize(("line", "file"), [("0::/a", "memory.events"), ("4:memory:/a", "memory/a/memory.oom_control")])
def test_kills_for_memory_are_of_the_group_and_of_the_host_where_no_group_says(tmp_path, line, file):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    assert kills_for_memory(tmp_path) == 0
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert kills_for_memory(tmp_path) == 7
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert kills_for_memory(tmp_path) == 3


@pytest.mark.parametrize("place", ["disk", "nowhere"])
def test_room_for_a_copy_is_on_disk_where_memory_is_short_and_the_disk_has_room(tmp_path, monkeypatch, place):
    monkeypatch.setattr(operating_system, "SPARE", 0.0)
    folder = tmp_path / "new" if place == "disk" else tmp_path / "file" / "below"
    (tmp_path / "file").touch()  # no folder can be made below it
    room = operating_system.memory_or_disk(1 << 20, folder)
    room[:] = 7
    assert room.shape == (1 << 20,) and int(room.sum()) == 7 << 20
    mapped = f"{tmp_path}/" in Path("/proc/self/maps").read_text()
    assert mapped == (place == "disk")
    assert not [*folder.glob("*")] and operating_system.memory_or_disk(0, folder).shape == (0,)
