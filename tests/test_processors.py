"""How many processors a process may use, by its affinity and by the quotas of its cgroups of both versions; and whether
others run on them.
"""

import os

import pytest

from shoestring.processors import are_wanted, processors, share_processors

PERIOD = 100_000


@pytest.fixture
def hundred(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(100), raising=False)


def system(root, kind, quotas):
    """A /proc and a /sys below `root`: the process is in the group a/b; quotas are by group, in processors."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"7:memory:/z\n{'2' if kind else '0'}:{kind}:/a/b\n1:name=systemd:/z\n")
    for path, quota in quotas.items():
        folder = root / "sys/fs/cgroup" / kind / path
        folder.mkdir(parents=True, exist_ok=True)
        if kind:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else int(quota * PERIOD)}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{PERIOD}\n")
        else:
            (folder / "cpu.max").write_text(f"{'max' if quota is None else int(quota * PERIOD)} {PERIOD}\n")
    return processors(root)


@pytest.mark.parametrize("kind", ["", "cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"": None, "a": None, "a/b": None}, 100),
        ({"a/b": 4}, 4),
        ({"a": 3, "a/b": 8}, 3),  # the tightest of a group and those above it
        ({"": 2, "a/b": 8}, 2),  # a container sees its own group as the root
        ({"a/b": 1.5}, 2),
        ({"a/b": 0.2}, 1),
        ({"a/b": 400}, 100),  # more than there are
        ({}, 100),  # not mounted
    ],
)
def test_the_smallest_of_affinity_and_quotas_counts(tmp_path, hundred, kind, quotas, expected):
    assert system(tmp_path, kind, quotas) == expected


def test_a_quota_that_cannot_be_read_is_none(tmp_path, hundred):
    assert processors(tmp_path) == 100
    system(tmp_path, "", {"a/b": 4})
    for text in ("", "4", "four 100000", "100000 0"):
        (tmp_path / "sys/fs/cgroup/a/b/cpu.max").write_text(text)
        assert processors(tmp_path) == 100


def test_this_process_has_some():
    assert 1 <= processors() <= os.cpu_count()


@pytest.mark.parametrize(
    ("running", "threads", "cores", "wanted"),
    [
        (1, "2", 2, False),  # only the process that looks
        (2, "2", 2, True),
        (2, "1", 2, False),
        (3, "1", 2, True),
        (1, "4", 2, False),  # too many threads of one's own keep nobody else from work
        (20, "4", 64, False),
        (70, "4", 64, True),
        (0, "2", 2, False),
    ],
)
def test_processors_are_wanted_by_others_if_all_threads_together_are_more(
    tmp_path, monkeypatch, running, threads, cores, wanted
):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text(f"0.10 0.20 0.30 {running}/512 4711\n")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert are_wanted(tmp_path) == wanted
    share_processors(tmp_path)
    assert ("GOMP_SPINCOUNT" in os.environ) == wanted
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    share_processors(tmp_path)
    assert os.environ["GOMP_SPINCOUNT"] == "7"  # the user's word


def test_where_nothing_is_known_of_others_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    share_processors(tmp_path)
    assert "GOMP_SPINCOUNT" not in os.environ
