"""netlab on this machine: real namespaces, links, losses, and nothing left behind."""

import errno
import os
import signal
import subprocess
import time
from functools import partial

import pytest

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab import DISK, LOGS, SHARED, by_hand, lab_folders, netlab, netlab_available
from tests.rigs.leftovers import (
    descendants,
    ends,
    folder_of,
    kill,
    left_after,
    start_owner,
    surroundings,
)
from tests.testing.on_hosts import python
from tests.waiting import until

REASON = netlab_available()
pytestmark = [pytest.mark.netlab, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with netlab(hosts=2, rate="100mbit", shm="8m", disk="8m", shared=tmp_path_factory.mktemp("shared")) as lab:
        yield lab


SERVER = """
    import socket, sys
    server = socket.create_server(("", int(sys.argv[1])))
    print("ready", flush=True)
    while True:
        link, taken = server.accept()[0], 0
        while piece := link.recv(1 << 16):
            taken += len(piece)
        link.sendall(str(taken).encode())
        link.close()
"""
CLIENT = """
    import socket, sys
    link = socket.create_connection(("host1", int(sys.argv[1])), timeout=float(sys.argv[3]))
    link.sendall(bytes(int(sys.argv[2])))
    link.shutdown(socket.SHUT_WR)
    print(socket.gethostname(), link.getpeername()[0], link.recv(64).decode())
"""


@pytest.fixture
def server(lab):
    """A server on host 1 that counts; gives its port."""
    port = 6000
    job = lab.start(python(SERVER, port), hosts=[1])
    until(lambda: "ready" in job.output(1))
    yield port
    job.kill()


def test_hosts_find_each_other_by_name_and_their_interfaces_count_every_byte(lab, server):
    sent = 1_000_000
    before = lab.bytes(0), lab.bytes(1)
    assert lab.run(python(CLIENT, server, sent, 30), hosts=[0]) == {0: f"host0 10.77.0.2 {sent}\n"}
    tx, rx = lab.bytes(0).tx - before[0].tx, lab.bytes(1).rx - before[1].rx
    assert tx == rx
    assert sent * 1514 / 1448 <= tx <= sent * 1.06
    assert lab.bytes(1).tx - before[1].tx == lab.bytes(0).rx - before[0].rx <= tx / 10


def test_a_host_has_its_own_name_processes_interfaces_and_memory(lab):
    (lab.path(0, "/dev/shm") / "mine").write_text("x")
    (lab.path(0, DISK) / "mine").write_text("x")
    seen = lab.run(["sh", "-c", f"hostname; ls -d /proc/[0-9]* | wc -l; ls /dev/shm {DISK}; cut -d: -f1 /proc/net/dev"])
    assert "mine" in seen[0]
    assert "mine" not in seen[1]
    for host, text in seen.items():
        assert text.startswith(f"host{host}\n")
        assert text.split()[-2:] in (["lo", "eth0"], ["eth0", "lo"])
        assert int(text.split()[1]) <= 4
    assert not (DISK / "mine").exists()  # the machine's own folder of that name


def test_hosts_share_the_one_folder_that_is_shared_and_see_their_logs(lab):
    lab.run(["sh", "-c", f"echo from a host >{SHARED}/note"], hosts=[0])
    assert lab.run(["cat", str(SHARED / "note")], hosts=[1]) == {1: "from a host\n"}
    assert sorted(lab.run(["ls", str(LOGS)], hosts=[1])[1].split()) == sorted(path.name for path in lab.logs.iterdir())


def test_a_command_runs_in_this_folder_with_what_is_added_to_the_environment(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = lab.run(["sh", "-c", 'echo "$PWD $ADDED $KEPT"'], env={"ADDED": "one"}, hosts=[1])
    assert output == {1: f"{tmp_path} one \n"}


def test_memory_and_disk_have_their_sizes_and_a_disk_can_be_filled(lab):
    for place in (lab.path(0, "/dev/shm"), lab.path(0, DISK)):
        assert os.statvfs(place).f_blocks * os.statvfs(place).f_frsize == 8 << 20
    file = lab.path(0, DISK) / "file"
    file.write_bytes(bytes(1 << 20))
    lab.fill(0, free=1 << 16)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (lab.path(0, DISK) / "more").write_bytes(bytes(1 << 17))
    assert file.stat().st_size == 1 << 20
    other = os.statvfs(lab.path(1, DISK))
    assert other.f_bfree * other.f_frsize > 1 << 20
    lab.unfill(0)
    (lab.path(0, DISK) / "more").write_bytes(bytes(1 << 17))


def test_a_cut_cable_passes_nothing_until_it_is_mended(lab, server):
    lab.cut(1)
    before = lab.bytes(1)
    with pytest.raises(WorldError, match=r"timed out|unreachable|No route"):
        lab.run(python(CLIENT, server, 1, 0.3), hosts=[0])
    assert lab.bytes(1).rx == before.rx
    lab.mend(1)
    until(lambda: reaches(lab, server))


def reaches(lab, server):
    try:
        return lab.run(python(CLIENT, server, 1, 5), hosts=[0])[0].endswith(" 1\n")
    except WorldError:  # "no route to host", while the neighbour was asked for and has not answered
        return False


@pytest.mark.parametrize(("host", "up", "down"), [(0, "1mbit", "100mbit"), (1, "100mbit", "1mbit")])
def test_either_end_of_a_link_is_slowed_while_a_transfer_runs(lab, server, host, up, down):
    sending = lab.start(python(CLIENT, server, 1 << 30, 60), hosts=[0])
    start = lab.bytes(1).rx
    until(lambda: lab.bytes(1).rx > start + 100_000)
    lab.rate(host, up, down=down)
    begin, first = time.monotonic(), lab.bytes(1).rx
    until(lambda: lab.bytes(1).rx > first + 60_000)
    assert time.monotonic() - begin > 0.25  # a lower bound, so a slow machine is fine: at 100 Mbit/s it would be 5 ms
    sending.kill()
    lab.rate(host, "100mbit")
    assert sending.codes() == {0: -signal.SIGKILL}


def test_a_removed_host_is_silent_and_comes_back_empty(lab):
    watcher = """
        import socket
        server = socket.create_server(("", 6001))
        print("ready", flush=True)
        link = server.accept()[0]
        print("joined", flush=True)
        link.settimeout(0.5)
        try:
            print("farewell" if link.recv(1) == b"" else "data")
        except TimeoutError:
            print("silence")
    """
    peer = "import socket, time; link = socket.create_connection(('host0', 6001), timeout=30); time.sleep(1000)"
    watching = lab.start(python(watcher), hosts=[0])
    until(lambda: "ready" in watching.output(0))
    doomed = lab.start(python(peer), hosts=[1])
    until(lambda: "joined" in watching.output(0))
    (lab.path(1, "/dev/shm") / "memory").write_text("x")
    lab.remove(1)
    assert lab.hosts == (0,)
    assert doomed.wait(30) == {1: -signal.SIGKILL}
    watching.check(30)
    assert watching.output(0).endswith("silence\n")
    with pytest.raises(WorldError, match=r"no host1 \(hint: there are: host0\)"):
        lab.bytes(1)
    lab.add(1)
    assert list(lab.path(1, "/dev/shm").iterdir()) == []
    doomed.join(1)
    with pytest.raises(WorldError, match="still runs on host1"):
        doomed.join(1)
    with pytest.raises(WorldError, match="there is a host1"):
        lab.add(1)
    doomed.kill()


def test_a_failing_command_is_told_with_its_last_words(lab):
    with pytest.raises(WorldError, match=r"(?s)failed: host0 with 3, host1 with 3.*--- host0\nalas"):
        lab.run(["sh", "-c", "echo alas >&2; exit 3"])
    with pytest.raises(WorldError, match=r"still running after 0\.1 s: host1"):
        lab.run(["sleep", "1000"], hosts=[1], timeout=0.1)


def test_a_job_can_be_killed_before_it_has_reached_its_host(lab):
    for _ in range(5):
        job = lab.start(["sleep", "1000"])
        job.kill()
        assert set(job.codes()) == {0, 1}
        assert None not in job.codes().values()


def test_kill_takes_what_the_command_has_started_too_and_signal_only_itself(lab):
    program = ["sh", "-c", "trap 'echo notice; exit 7' TERM; setsid sleep 1000 & echo up; wait"]
    job = lab.start(program, hosts=[0])
    until(lambda: "up" in job.output(0))
    sleepers = partial(lab.run, ["sh", "-c", "cat /proc/[0-9]*/comm | grep -c sleep"], hosts=[0])
    until(lambda: sleepers() == {0: "2\n"})  # and the host's first process
    job.signal(signal.SIGTERM)
    assert job.wait(30) == {0: 7}
    assert job.output(0) == "up\nnotice\n"
    job.kill()
    until(lambda: sleepers() == {0: "1\n"})  # not even a zombie: the orphan has been reaped
    with pytest.raises(WorldError, match="does not run"):
        job.signal(signal.SIGTERM)


WORKER = """
import os, pathlib, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, been = dist.get_rank(), pathlib.Path(sys.argv[1])
total = torch.full((250_000,), float(rank + 1))
total[-1] = rank == 0 and been.exists()
dist.all_reduce(total)
again = bool(total[-1])
print(f"{'again' if again else 'first'} rank {rank} on {os.uname().nodename} sum {total[0].item():g}", flush=True)
if not again:
    been.touch()
    dist.recv(total, 1 - rank)  # for a message that never comes
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_meets_across_hosts_and_restarts_a_worker_that_is_killed_by_rank(lab, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    before = lab.bytes(0).tx
    # Else the second attempt may read the first one's addresses: github.com/pytorch/pytorch/issues/135712
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    job = lab.torchrun([str(script), str(tmp_path / "been")], max_restarts=2, env=env)
    until(lambda: all("first rank" in job.output(host) for host in lab.hosts), seconds=120)
    assert lab.bytes(0).tx - before > 1_000_000  # the ring all-reduce of 1 MB went over the wire
    lab.kill(rank=1)
    job.check(timeout=120)
    for host in lab.hosts:
        assert f"on host{host} sum 3" in job.worker_log(host).read_text()
        assert "again rank" in job.worker_log(host).read_text()
    with pytest.raises(WorldError, match="no processes have rank 1"):
        lab.kill(rank=1)


def test_a_delayed_link_is_late_both_ways_and_a_removed_host_comes_back():
    trip = """
        import socket, time
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        peer.settimeout(30)
        begin = time.monotonic()
        try:
            peer.connect(("host1", 9))
        except ConnectionRefusedError:
            print(time.monotonic() - begin)
    """
    with netlab(hosts=2, rate="10mbit", delay=0.05) as lab:
        assert float(lab.run(python(trip), hosts=[0])[0]) >= 0.1
        lab.remove(1)
        lab.add(1)
        assert float(lab.run(python(trip), hosts=[0])[0]) >= 0.1


def test_labs_side_by_side_do_not_meet_and_the_machine_is_not_touched(lab):
    before = surroundings()
    with netlab(hosts=1, rate="10mbit") as other:
        assert other.hosts == (0,)
        assert surroundings() == before
        silent = lab.bytes(0)
        with pytest.raises(WorldError):
            other.run(python(CLIENT, 9, 1, 0.2), hosts=[0])
        assert lab.bytes(0) == silent
    assert surroundings() == before
    assert lab.run(["hostname"]) == {0: "host0\n", 1: "host1\n"}


def test_killed_owners_leave_nothing():
    assert left_after(2) == []


def test_what_a_killed_owner_leaves_running_is_ended_by_the_next_start_and_nothing_of_others(lab):
    owner = start_owner()
    switch = lab_folders.LabRecord.read(folder_of(owner.pid)).switch
    switch.kill(signal.SIGSTOP)  # so that the lab cannot end itself
    family = list(descendants(owner.pid))
    foreign = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link add name br0 type bridge; echo made; read _; ip -o link show br0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert foreign.stdout.readline() == "made\n"
    kill(owner)
    assert switch.alive()
    with netlab(hosts=1):
        assert all(ends(identity) for identity in family)
    assert "br0" in foreign.communicate("\n")[0]
    assert lab.run(["hostname"]) == {0: "host0\n", 1: "host1\n"}


def test_a_block_that_raises_ends_the_lab_all_the_same():
    before = set(descendants(os.getpid()))
    with pytest.raises(RuntimeError, match="mishap"), netlab(hosts=1) as lab:
        lab.start(["sleep", "1000"])
        family = set(descendants(os.getpid())) - before
        raise RuntimeError("mishap")
    assert family
    assert not [identity for identity in family if identity.alive()]
    assert lab.logs.parent not in lab_folders.folders()


def test_logs_of_an_earlier_lab_are_not_written_over(tmp_path):
    for _ in range(2):
        with netlab(hosts=1, logs=tmp_path) as lab:
            if (tmp_path / "job0").exists():
                with pytest.raises(ConfigError, match="is of an earlier lab"):
                    lab.run(["true"])
            else:
                lab.run(["echo", "kept"])
    assert (tmp_path / "job0" / "host0.log").read_text() == "kept\n"


def test_a_lab_by_hand_is_up_until_down(capfd):
    if lab_folders.kept_lab():
        pytest.skip("a lab of `shoestring lab up` is up")
    by_hand.up(2, "10mbit")
    try:
        with pytest.raises(WorldError, match="already up"):
            by_hand.up()
        assert by_hand.run(["hostname"]) == 0
        assert by_hand.run(["sh", "-c", "[ $(hostname) = host0 ]"]) == 1
        assert by_hand.run(["sh", "-c", "getent hosts host1; exit 5"], host="host0") == 5
        with pytest.raises(WorldError, match=r"no host7 \(hint: it has host0, host1\)"):
            by_hand.run(["true"], host="host7")
    finally:
        by_hand.down()
    printed = capfd.readouterr().out
    assert "host0: host0\n" in printed
    assert "host1: host1\n" in printed
    assert "10.77.0.2 " in printed
    for verb in (by_hand.down, lambda: by_hand.run(["true"])):
        with pytest.raises(WorldError, match="no lab is up"):
            verb()
