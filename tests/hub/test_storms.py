"""Nothing is lost and nothing comes twice: killed hubs, killed clients, cut connections, full disks."""

import json
import os
import signal
import subprocess
import sys
from itertools import count

import pytest

from shoestring.core.errors import ShoestringError
from shoestring_hub.client.clip import send_clip
from shoestring_hub.client.logins import log_in
from shoestring_hub.client.push import push
from tests.hub.conftest import add_person
from tests.rigs.hub.backups import back_up_while_others_work, restored
from tests.rigs.hub.clips import make_clip, missing
from tests.rigs.hub.folders import contents, write_run
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.storms import CuttingProxy, storm
from tests.rigs.hub.visitor import Visitor
from tests.shares import ALL_CASES
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", ["killed hub", "cut connections", "killed clients"])
@pytest.mark.parametrize("seed", range(8))
def test_the_hubs_copy_equals_the_folder(server, project, ada, tmp_path, kind, seed):
    with CuttingProxy(server.port, seed, 0.3 if kind == "cut connections" else 0.0) as proxy:
        token = ada.make_token(project)
        for _ in range(20):
            try:
                log_in(f"http://127.0.0.1:{proxy.port}", token)
                break
            except ShoestringError:
                continue
        assert storm(server, tmp_path, seed, kill_server=kind == "killed hub") == ""


def test_the_comparison_sees_a_hub_that_loses_or_repeats_a_row(server, project, tmp_path):
    from tests.rigs.hub import storms

    real = storms.pull
    for fault in (lambda text: text[: text.rfind("\n", 0, -1) + 1], lambda text: text + text.splitlines()[-1] + "\n"):

        def faulty(number, copy, patience, fault=fault):
            real(number, copy, patience=patience)
            file = copy / "metrics.jsonl"
            file.write_text(fault(file.read_text()))

        storms.pull = faulty
        try:
            assert storm(server, tmp_path, 1, kill_server=False) == "metrics.jsonl"
        finally:
            storms.pull = real
        for path in tmp_path.glob("*-1"):
            subprocess.run(["rm", "-r", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_refuses_and_a_later_push_completes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        with HubServer(disk / "hub") as server:
            visitor = Visitor(server.port)
            visitor.set_password(add_person(server.folder, "ada"), "ada")
            visitor.make_project("full")
            log_in(server.address, visitor.make_token("full"))
            folder = write_run(tmp_path / "run")
            (folder / "big.bin").write_bytes(os.urandom(30 << 20))
            with pytest.raises(ShoestringError, match="cannot store more"):
                push(folder, patience=2.0)
            assert visitor.get("/full/").status == 200
            subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
            assert not push(folder, checkpoints=True).left_out
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


DYING = """
import os, signal, sys
from django.db.migrations.recorder import MigrationRecorder
record, left = MigrationRecorder.record_applied, [int(sys.argv[2])]
def dying(self, *names):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    record(self, *names)
MigrationRecorder.record_applied = dying
from shoestring.cli import main
main(["hub", "serve", sys.argv[1], "--port", "0"])
"""
"""A hub that is killed before it notes one of its migrations as done."""


def test_an_interrupted_migration_is_completed_by_the_next_start(tmp_path):
    """A hub starts although it was killed between making tables and noting that they are made, for some migrations or,
    with SHOESTRING_ALL_CASES, for each.

    Each start comes after one that was interrupted, and is killed some migrations later.
    """
    for moment in count(step=1 if ALL_CASES else 3):
        command = [sys.executable, "-c", DYING, str(tmp_path / "hub"), str(moment)]
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
            if started := process.stdout.readline().startswith("hub: "):
                os.killpg(process.pid, signal.SIGTERM)
        if started:
            break
        assert process.returncode == -signal.SIGKILL
    assert moment > 10
    with HubServer(tmp_path / "hub") as server:
        assert Visitor(server.port).get("/sign-in").status == 200


def test_backup_and_restore_of_a_hub_that_serves(server, project, ada, tmp_path, monkeypatch):
    from shoestring.cli import main

    folder = write_run(tmp_path / "run", steps=30)
    push(folder, checkpoints=True)
    hub = lambda *words: subprocess.run(  # noqa: E731
        [sys.executable, "-m", "shoestring", "hub", *map(str, words)], capture_output=True, text=True, check=False
    )
    ada.get(f"/{project}/runs/1")
    ada.post(f"/{project}/runs/1/comments", text="worth keeping, @ada")
    video = f"/{project}/clips/1/video.mp4"
    if not missing():
        send_clip(make_clip(tmp_path / "clip.mp4"))
        until(lambda: ada.get(video).status == 200)
    backup = tmp_path / "backup"
    assert hub("backup", server.folder, "--to", backup).returncode == 0
    again = hub("backup", server.folder, "--to", backup)
    assert "0 B of new chunks and clips" in again.stdout
    restored = tmp_path / "restored"
    assert hub("restore", restored, "--backup", backup).returncode == 0
    assert "is not empty" in hub("restore", restored, "--backup", backup).stderr
    (token,) = {login["token"] for login in json.loads((tmp_path / "state/shoestring/hub/logins.json").read_text())}
    with HubServer(restored) as second:
        visitor = Visitor(second.port)
        visitor.sign_in("ada")
        assert ">small</a>" in visitor.get(f"/{project}/").text
        assert f"/{project}/runs/1?comment=1" in visitor.get("/search?q=keep").text
        assert visitor.get(video).body == ada.get(video).body
        log_in(second.address, token)
        assert main(["hub", "pull", "1", "--folder", str(tmp_path / "copy")]) == 0
        assert contents(tmp_path / "copy") == contents(folder)
        push(folder, checkpoints=True)
        assert "0 B were sent" in push(folder, checkpoints=True).lines[-1]
        other = write_run(tmp_path / "other")
        push(other)  # ids continue after those of the backup
    chunk = next(path for path in (backup / "chunks").rglob("*") if path.is_file() and path.stat().st_size > 10)
    chunk.write_bytes(b"x" * chunk.stat().st_size)
    assert "is damaged" in hub("restore", tmp_path / "third", "--backup", backup).stderr


def test_a_backup_is_of_one_moment(server, project, ada, tmp_path):
    push(write_run(tmp_path / "first", name="first"))
    said = back_up_while_others_work(server, tmp_path / "backup", write_run(tmp_path / "second", name="second"))
    assert "a backup of this hub is being made" in said
    assert ">second<" in ada.get(f"/{project}/").text
    restored(tmp_path / "restored", tmp_path / "backup")
    with HubServer(tmp_path / "restored") as second:
        visitor = Visitor(second.port)
        visitor.sign_in("ada")
        page = visitor.get(f"/{project}/").text
        assert ">first<" in page and ">second<" not in page
