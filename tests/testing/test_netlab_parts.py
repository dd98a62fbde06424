"""netlab's parts that need no privileges: rates, sizes, lab records, and telling processes apart."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab import by_hand, lab_folders, links, machine, netlab, netlab_available
from shoestring.testing.netlab.hosts import HostSpec, spawn
from shoestring.testing.netlab.lab_folders import LabRecord
from shoestring.testing.netlab.machine import Identity


@pytest.mark.parametrize(
    ("text", "bits"), [("1mbit", 10**6), ("2.5gbit", 25 * 10**8), ("64kbit", 64_000), (" 9600BIT", 9600)]
)
def test_a_rate_is_read_as_tc_writes_it(text, bits):
    assert links.bits_per_second(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "100", "100mbps", "-1mbit", "1mbit; reboot", "7bit", "1e9bit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ConfigError, match="not a rate"):
        links.bits_per_second(text)


@pytest.mark.parametrize("bits", [8_000, 10**6, 10**8, 10**9, 10**10])
def test_a_bucket_holds_whole_frames_and_at_most_four_milliseconds_of_a_fast_rate(bits):
    words = links.tbf(bits).split()
    burst, limit = int(words[words.index("burst") + 1]), int(words[words.index("limit") + 1])
    assert 1514 <= burst <= max(bits / 8 * 0.004, 4 * 1514)
    assert limit >= 8 * burst


def test_every_possible_host_has_one_name_and_address():
    lines = [line.split() for line in links.names().splitlines()]
    plain = {name: address for address, name in lines if ":" not in address}
    assert plain["host0"] == "10.77.0.1"
    assert plain["host249"] == "10.77.0.250"
    assert len(plain) == len(set(plain.values())) == links.MOST_HOSTS + 1


@pytest.mark.parametrize("setting", [{"shm": "0"}, {"disk": "1g,exec"}, {"disk": "10 m"}, {"delay": -1.0}])
def test_a_wrong_setting_is_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        HostSpec(**setting)


def test_wrong_arguments_are_refused_before_the_machine_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for wrong in ({"hosts": 0}, {"hosts": 251}, {"rate": "quick"}, {"shared": tmp_path / "absent"}):
        with pytest.raises(ConfigError), netlab(**wrong):
            pass


def test_without_root_or_a_tool_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab_available() == "netlab needs root"
    with pytest.raises(WorldError, match="netlab needs root"), netlab():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "_path", lambda: str(tmp_path))
    assert netlab_available() == "netlab needs `ip` (package iproute2)"


def test_a_tool_that_fails_is_quoted():
    with pytest.raises(WorldError, match="no such thing"):
        machine.tool(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(WorldError, match="refused here"):
        spawn(["sh", "-c", "echo refused here >&2"])


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def test_a_process_is_not_taken_for_one_that_had_its_number(sleeper):
    now = Identity.of(sleeper.pid)
    earlier = replace(now, started=now.started - 1)
    assert now.alive()
    assert not earlier.alive()
    assert not earlier.kill()
    assert sleeper.poll() is None
    assert now.kill()
    assert sleeper.wait() == -9
    assert not now.alive()
    assert not now.kill()


@pytest.fixture
def root(monkeypatch, tmp_path):
    monkeypatch.setattr(lab_folders, "ROOT", tmp_path / "labs")
    return tmp_path / "labs"


def test_a_record_comes_back_as_it_was(root):
    folder = lab_folders.create()
    mine = replace(
        LabRecord.mine(), switch=Identity(pid=1, started=2), hosts={3: Identity(pid=4, started=5)}, standing=True
    )
    mine.write(folder)
    assert LabRecord.read(folder) == mine
    assert folder.stat().st_mode & 0o777 == root.stat().st_mode & 0o777 == 0o700
    lab_folders.discard(folder)
    assert not root.exists()


def test_a_sweep_takes_what_killed_owners_left_and_nothing_else(root, sleeper):
    gone = replace(LabRecord.mine(), owner=Identity(pid=sleeper.pid, started=1))
    cases = {
        "left": gone,
        "left before the machine was started": replace(gone, boot="another"),
        "alive": LabRecord.mine(),
        "of another container": replace(gone, pid_namespace="pid:[1]"),
    }
    folders = {}
    for what, record in cases.items():
        folders[what] = lab_folders.create()
        record.write(folders[what])
    folders["not a lab"] = root / "notes"
    folders["not a lab"].mkdir()
    lab_folders.sweep()
    left = {what for what, folder in folders.items() if folder.exists()}
    assert left == {"alive", "of another container", "not a lab"}
    assert sleeper.poll() is None


def test_a_sweep_kills_the_first_process_of_a_left_lab_only(root, sleeper):
    switch = Identity.of(sleeper.pid)
    gone = replace(LabRecord.mine(), owner=Identity(pid=sleeper.pid, started=1))
    replace(gone, switch=replace(switch, started=switch.started - 1)).write(lab_folders.create())
    replace(gone, switch=switch, boot="another").write(lab_folders.create())
    lab_folders.sweep()
    assert sleeper.poll() is None
    replace(gone, switch=switch).write(lab_folders.create())
    lab_folders.sweep()
    assert sleeper.wait() == -9


def test_a_folder_that_others_can_enter_is_not_trusted(root):
    root.mkdir(mode=0o755)
    with pytest.raises(WorldError, match="not a private folder"):
        lab_folders.create()
    root.rmdir()
    root.symlink_to("/tmp")
    with pytest.raises(WorldError, match="not a private folder"):
        lab_folders.sweep()


def test_torchrun_on_all_hosts_gets_a_rendezvous_unless_it_has_one():
    bare = by_hand.with_rendezvous(["torchrun", "train.py"], ["host0", "host1"])
    assert bare[:7] == ["torchrun", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400"]
    assert bare[-2:] == [str(os.getpid()), "train.py"]
    for own in (["torchrun", "--nnodes=1", "train.py"], ["python", "train.py"]):
        assert by_hand.with_rendezvous(own, ["host0", "host1"]) == own
