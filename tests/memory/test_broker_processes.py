"""The broker between real processes: kills, forks, and files that somebody else has made."""

import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from broker_hosts import Pretended

from shoestring.core.errors import ShoestringError
from shoestring.core.leases import Priority
from shoestring.memory.broker.arbitration import Lease
from shoestring.memory.broker.ledger import close_ledger, open_ledger
from shoestring.memory.broker.records import LONGEST, TenantRecord
from shoestring.memory.broker.tenant import BrokeredMemory, Terms
from tests.rigs.checkpointing.surroundings import listening

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
LIMIT = 60  # seconds for what takes a hundredth of one


@pytest.fixture
def host(tmp_path):
    return Pretended(tmp_path / "user" / "broker")


# -- real processes ---------------------------------------------------------------------------------------------------

TENANT = """
import os, sys, subprocess
from pathlib import Path
from shoestring.core.leases import Priority
from shoestring.memory.broker.tenant import BrokeredMemory, Terms
memory = BrokeredMemory(terms=Terms(Path(sys.argv[1]), tenant="child"))
memory.join()
memory.take("cache", int(sys.argv[2]), Priority.CACHE)
how = sys.argv[3]
child = 0
if how == "forks":
    child = os.fork()
    if child == 0:
        assert memory.take("its own", 5) and memory._ledger is None  # and is no tenant
        sys.stdin.read()
elif how == "copies":
    turn = memory.turn(Priority.REQUIRED)
    turn.__enter__()
elif how == "starts":
    child = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, close_fds=False).pid
print(child, flush=True)
sys.stdin.read()
"""


@contextmanager
def tenant_process(folder, nbytes=1 << 20, how="alone"):
    """A tenant in a process of its own, and the number of its child."""
    command = [sys.executable, "-c", TENANT, str(folder), str(nbytes), how]
    process = subprocess.Popen(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert select.select([process.stdout], [], [], LIMIT)[0], "it did not start"
        child = int(process.stdout.readline())
        yield process, child
    finally:
        process.kill()
        process.wait(LIMIT)
        process.stdout.close()
        process.stdin.close()
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def others(memory):
    """Names of the other tenants' leases."""
    with memory._ledger.locked(LIMIT):
        return [name for seen in memory._ledger.scan() if seen.key != memory._key for name in seen.record.leases]


@pytest.fixture
def own(tmp_path):
    memory = BrokeredMemory(terms=Terms(tmp_path / "user" / "broker"))
    memory.join(watch=False)
    yield memory
    memory.leave()


@pytest.mark.parametrize("how", ["alone", "forks", "starts"])
def test_leases_of_a_killed_process_are_free_at_once(own, how):
    """Whatever its children do: those that load its data, and programs that it has started."""
    with tenant_process(own.terms.folder, how=how) as (process, child):
        assert others(own) == ["cache"]
        process.kill()
        process.wait(LIMIT)
        assert others(own) == []
        assert not child or os.path.exists(f"/proc/{child}")  # noqa: PTH110  (a process, not a file)
    assert sorted(path.name for path in own.terms.folder.iterdir()) == sorted(["bell", own._key, "turns"])


def test_a_stopped_process_keeps_its_leases(own):
    with tenant_process(own.terms.folder) as (process, _):
        os.kill(process.pid, signal.SIGSTOP)
        assert others(own) == ["cache"]


def test_what_a_process_has_in_memory_is_asked_of_the_system(own):
    with tenant_process(own.terms.folder) as (process, _), own._ledger.locked(LIMIT):
        (seen,) = (seen for seen in own._ledger.scan() if seen.key != own._key)
        assert seen.process == process.pid and seen.user == os.geteuid()
        assert 0.5 < seen.resident / own._ledger.scan()[0].resident < 2 or seen.resident > 5 << 20


def test_a_folder_that_is_kept_locked_stops_no_training(own, monkeypatch):
    """Somebody was stopped in the wrong moment: what is required is granted all the same."""
    monkeypatch.setattr("shoestring.memory.broker.tenant.PATIENCE", 0.05)
    command = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, 2); print(1, flush=True); "
    command = [sys.executable, "-c", command + "sys.stdin.read()", str(own.terms.folder / "bell")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert select.select([process.stdout], [], [], LIMIT)[0] and process.stdout.readline()
        with listening() as said:
            assert own.take("needed", 100) and not own.take("cache", 100, Priority.CACHE)
            own.give("nothing")
        assert (
            len(said) == 1
            and "other processes do not see the memory that this process takes: another process has" in said[0]
        )
        process.kill()
    own.look()
    assert own._record.leases["needed"].nbytes == 100 and not own._unwritten


def test_the_command_shows_who_holds_what(own, tmp_path, capsys):
    from shoestring.cli import main

    assert main(["memory", "host", "--folder", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "nothing").mkdir()
    assert main(["memory", "host", "--folder", str(tmp_path / "nothing")]) == 0
    assert "no process has leased memory in" in capsys.readouterr().out
    folder = tmp_path / f"shoestring-{os.geteuid()}" / "broker"
    mine = BrokeredMemory(terms=Terms(folder, tenant="training"))
    mine.join(watch=False)
    assert mine.take("optimizer state", 5_000_000) and mine.take("slots", 3_000_000, Priority.PEERS)
    with tenant_process(folder, nbytes=7_000_000) as (process, _):
        assert main(["memory", "host", "--folder", str(tmp_path)]) == 0
    mine.leave()
    head, first, second, third, left, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["tenant", "user", "process", "share", "in", "memory", "lease", "bytes", "priority"]
    assert first.split()[:4] == ["training", str(os.geteuid()), str(os.getpid()), "1"]
    assert first.split()[-5:] == ["optimizer", "state", "4.77", "MiB", "required"]
    assert second.split() == ["slots", "2.86", "MiB", "peers"]
    assert third.split()[2] == str(process.pid) and third.split()[-4:] == ["cache", "6.68", "MiB", "cache"]
    assert left.startswith("host: ") and left.endswith("left to lease, beside a reserve of 10%")


# -- what somebody else has put there ---------------------------------------------------------------------------------

GARBAGE = [b"", b"{}", b"\xff\x00", b"[" * 10**5, b"null", b'{"tenant": 1}', b"x" * (LONGEST + 5), b'{"tenant": NaN}']


def sample(**changes):
    said = json.loads(TenantRecord("name", leases={"a": Lease(5, Priority.CACHE, 1.0)}).encoded())
    return json.dumps(said | changes).encode()


@pytest.mark.parametrize(
    "data",
    [
        *GARBAGE,
        sample(leases={"a": [5, 9, 1.0]}),
        sample(leases={"a": [5, 1]}),
        sample(leases=[]),
        sample(share="much"),
        sample(working=float("nan")),
        sample(bounds=5),
    ],
)
def test_a_record_that_nobody_wrote_is_none(data):
    with pytest.raises(ValueError):
        TenantRecord.decoded(data)


def test_a_record_is_kept_within_bounds():
    found = TenantRecord.decoded(sample(working=-5, share=1e9, tenant="\x1b[2J" + "x" * 500, resident=1e300))
    assert found.working == 0 and found.share == 1e3 and found.resident == 1 << 56
    assert found.tenant.startswith("?[2Jx") and len(found.tenant) == 80
    assert TenantRecord.decoded(sample()).leases == {"a": Lease(5, Priority.CACHE, 1.0)}


@pytest.mark.slow
def test_what_is_no_tenants_file_is_passed_by(own):
    folder = own.terms.folder
    (folder / "tenant-dead").write_bytes(b"garbage")
    (folder / "tenant-folder").mkdir()
    os.mkfifo(folder / "tenant-pipe")
    (folder / "tenant-link").symlink_to(folder / own._key)
    os.link(folder / own._key, folder / "tenant-again")  # closing it would end this process's own lock
    os.link(folder / "bell", folder / "tenant-bell")
    with tenant_process(folder):
        assert others(own) == ["cache"] and others(own) == ["cache"]
    assert not (folder / "tenant-dead").exists()
    assert own.take("mine", 5, Priority.CACHE)
    check = "import sys; from pathlib import Path; from shoestring.memory.broker.ledger import open_ledger\n"
    check += "ledger = open_ledger(Path(sys.argv[1]), shared=False)\nwith ledger.locked(9): print(ledger.scan())"
    done = subprocess.run(
        [sys.executable, "-c", check, str(folder)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert "mine" in done.stdout, done.stderr


def test_a_file_that_somebody_removed_is_written_again(own):
    assert own.take("a", 5, Priority.CACHE)
    (own.terms.folder / own._key).unlink()
    assert own.take("b", 6, Priority.CACHE)
    assert json.loads((own.terms.folder / own._key).read_bytes())["leases"].keys() == {"a", "b"}


def test_a_wish_from_the_future_counts_for_nothing(host):
    one, other = host.tenant("one"), host.tenant("other")
    assert one.take("slots", 900, Priority.CHECKPOINT)
    with other._ledger.locked(LIMIT):
        wants = {"x": Lease(500, Priority.REQUIRED, host.now + 1e6)}
        other._ledger.write(other._key, replace(other._record, wants=wants))
    host.now += 1
    one.look()
    assert not one.called_back
    one.leave(), other.leave()


def test_folders_that_cannot_be_used_say_why(tmp_path):
    with pytest.raises(ShoestringError, match=r"link or a file, not a folder \(hint: remove it"):
        (tmp_path / "1").symlink_to(tmp_path)
        open_ledger(tmp_path / "1" / "x", shared=False) and open_ledger(tmp_path / "1", shared=True)
    private = tmp_path / "private"
    private.mkdir(0o700)
    with pytest.raises(ShoestringError, match="cannot be shared: its mode is 700, and not 1777"):
        open_ledger(private, shared=True)
    with pytest.raises(ShoestringError, match=r"cannot keep records of host memory in .*: "):
        open_ledger(Path("/proc/none/broker"), shared=False)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "broker").write_text("")
    with pytest.raises(ShoestringError, match="is not private to this user: it is a link or a file"):
        open_ledger(tmp_path / "user" / "broker", shared=False)


def test_a_shared_folder_is_everybodys_and_its_records_are_their_owners(tmp_path):
    before = os.umask(0o077)
    try:
        ledger = open_ledger(tmp_path / "shared", shared=True)
        with ledger.locked(LIMIT):
            key = ledger.join(TenantRecord("one"))
        modes = [stat.S_IMODE((tmp_path / "shared" / name).stat().st_mode) for name in (".", "bell", key)]
        assert modes == [0o1777, 0o666, 0o644]
        close_ledger(ledger)
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_sees_what_is_shared_and_nothing_else(tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_mode & 0o5 != 0o5 and folder.owner() == "root":
            folder.chmod(folder.stat().st_mode | 0o5)
    memory = BrokeredMemory(terms=Terms(tmp_path / "shared", shared=True))
    memory.join(watch=False)
    assert memory.take("mine", 1 << 20, Priority.CACHE)
    look = "import os, sys; from pathlib import Path; from shoestring.memory.broker.tenant import *; "
    look += "os.setgid(65534); os.setuid(65534); "
    look += "m = BrokeredMemory(terms=Terms(Path(sys.argv[1]), shared=True)); m.join(watch=False); "
    look += "m.take('theirs', 5); print([list(s.record.leases) for s in m._ledger.scan()], flush=True)"
    command = [sys.executable, "-c", look, str(tmp_path / "shared")]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=LIMIT)
    assert "['theirs'], ['mine']" in done.stdout, done.stderr
    memory.leave()


# -- turns -------------------------------------------------------------------------------------------------------------


def test_what_is_less_urgent_waits_for_another_process_until_that_is_killed(host):
    host.folder.parent.mkdir(mode=0o700)
    with tenant_process(host.folder, how="copies") as (process, _):
        memory = BrokeredMemory(terms=Terms(host.folder))
        memory.join(watch=False)
        try:
            turns = memory._ledger.turns
            assert turns.yields(Priority.CHECKPOINT) and turns.yields(Priority.CACHE)
            assert not turns.yields(Priority.REQUIRED)
            began = time.monotonic()
            with memory.turn(Priority.CHECKPOINT, 0.05):  # goes on after it has waited
                assert time.monotonic() - began >= 0.05
            process.kill()
            process.wait(LIMIT)
            began = time.monotonic()
            with memory.turn(Priority.CHECKPOINT, LIMIT):
                assert time.monotonic() - began < LIMIT / 2
        finally:
            memory.leave()


def test_threads_of_a_process_take_turns_and_forked_children_none(host):
    host.folder.parent.mkdir(mode=0o700)
    memory = BrokeredMemory(terms=Terms(host.folder))
    with memory.turn(Priority.CHECKPOINT):  # before it joined, there is nobody
        memory.join(watch=False)
    turns = memory._ledger.turns
    try:
        with memory.turn(Priority.REQUIRED):
            with memory.turn(Priority.REQUIRED):
                assert turns.yields(Priority.CHECKPOINT)
            assert turns.yields(Priority.CHECKPOINT)  # until the last one has ended
            child = os.fork()
            if child == 0:
                with memory.turn(Priority.CHECKPOINT, LIMIT):
                    os._exit(memory._ledger is not None)
            assert os.waitpid(child, 0)[1] == 0
            assert turns.yields(Priority.CHECKPOINT)
        assert not turns.yields(Priority.CHECKPOINT)
    finally:
        memory.leave()
