"""Runs arrive whole: pushed, pushed again, grown, rewritten, and pulled."""

import json
import os

import pytest

from shoestring.cli import main
from shoestring.core.errors import ConfigError, DataError
from shoestring_hub.client import pull as pulling
from shoestring_hub.client import push as pushing
from shoestring_hub.client.connection import Connection, HubError
from shoestring_hub.client.logins import login_for
from shoestring_hub.client.pull import pull
from shoestring_hub.client.push import push
from shoestring_hub.protocol import CHUNK, digest
from tests.rigs.hub.folders import contents, rows, write_run
from tests.small_runs import write_run_file, write_texts


@pytest.mark.slow
def test_a_pulled_run_is_the_folder_that_was_pushed(project, tmp_path):
    folder = write_run(tmp_path / "runs" / "small")
    outcome = push(folder, checkpoints=True)
    assert not outcome.left_out
    pull(1, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)
    assert "0 B were received" in pull(1, tmp_path / "copy")[0]


@pytest.mark.slow
def test_a_second_push_sends_what_is_new_and_removes_what_is_gone(project, tmp_path):
    folder = write_run(tmp_path / "small")
    push(folder, checkpoints=True)
    assert "0 B were sent" in push(folder, checkpoints=True).lines[-1]
    (folder / "report.html").unlink()
    (folder / "notes.txt").write_text("new")
    (folder / "metrics.jsonl").write_text(rows(1, 30) + rows(31, 60, seed=9))  # as a run does that resumes at step 30
    push(folder)
    pull(1, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)


def test_training_resumes_from_a_pulled_run_bit_for_bit(project, tmp_path):
    settings = {
        "data": write_texts(tmp_path / "texts"),
        "steps": 6,
        "batch": 2,
        "folder": str(tmp_path / "run"),
        "packages": [],
    }
    file = write_run_file(tmp_path / "run.toml", {"run": settings, "checkpoint": {"tiered": {"disk_every": 2}}})
    assert main(["train", str(file), "--run.steps", "4"]) == 0
    assert main(["hub", "push", str(tmp_path / "run"), "--checkpoints"]) == 0
    assert main(["hub", "pull", "1", "--folder", str(tmp_path / "copy")]) == 0
    losses = []
    for folder in ("run", "copy"):
        assert main(["train", str(file), "--run.folder", str(tmp_path / folder), "--run.resume", "auto"]) == 0
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    models = [sorted((tmp_path / folder / "model").rglob("*.safetensors")) for folder in ("run", "copy")]
    assert [path.read_bytes() for path in models[0]] == [path.read_bytes() for path in models[1]] != []


def test_checkpoints_stay_on_the_hub_unless_a_push_says_so(project, tmp_path):
    folder = write_run(tmp_path / "small")
    push(folder, checkpoints=True)
    for path in (folder / "checkpoints" / "50").iterdir():
        path.unlink()
    push(folder)
    pull(1, tmp_path / "copy")
    assert len(list((tmp_path / "copy" / "checkpoints" / "50").iterdir())) == 3
    push(folder, checkpoints=True)
    pull(1, tmp_path / "second")
    assert not (tmp_path / "second" / "checkpoints").exists()


def test_a_push_continues_with_the_chunks_that_are_missing(project, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "small")
    (folder / "big.bin").write_bytes(os.urandom(2 * CHUNK + 5))
    sent, ask = [], Connection.ask

    def cut(self, method, path, body=b"", /, **query):
        if path.startswith("chunks/") and method == "PUT":
            if len(sent) == 2:
                raise KeyboardInterrupt
            sent.append(path)
        return ask(self, method, path, body, **query)

    monkeypatch.setattr(Connection, "ask", cut)
    with pytest.raises(KeyboardInterrupt):
        push(folder)
    first, sent[:] = list(sent), []
    monkeypatch.setattr(Connection, "ask", lambda *a, **q: (sent.append(a[2]), ask(*a, **q))[1])
    push(folder)
    assert len(first) == 2 and not set(first) & set(sent)
    pull(1, tmp_path / "copy")
    assert (tmp_path / "copy" / "big.bin").read_bytes() == (folder / "big.bin").read_bytes()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_files_of_all_sizes_arrive(project, tmp_path, size):
    folder = write_run(tmp_path / "small", files=0)
    (folder / "file").write_bytes(b"x" * size)
    push(folder)
    pull(1, tmp_path / "copy")
    assert (tmp_path / "copy" / "file").read_bytes() == b"x" * size


@pytest.mark.parametrize(
    "log",
    [
        b"",
        b"\n",
        b'{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n{"step": 1, "loss": -Infinity}\n',
        b'{"step": 1, "loss": 2}\n{"step": 2, "lo',
        b"not json\r\n\0\xff\xfe",
        b'{"step": 99999999999999999999999, "loss": 1}\n{"step": -1, "loss": 1e308, "' + b"k" * 5000 + b'": 1}\n',
        b'{"step": 1, "x": "' + b"y" * 400_000 + b'"}\n{"step": 2, "loss": 1}\n',
        b"[" * 100_000,
    ],
    ids=["empty", "blank", "not finite", "cut short", "not json", "huge numbers", "long line", "nested"],
)
def test_any_metrics_arrive_as_they_are(project, ada, tmp_path, log):
    folder = write_run(tmp_path / "small", files=0)
    (folder / "metrics.jsonl").write_bytes(log)
    push(folder)
    pull(1, tmp_path / "copy")
    copy = tmp_path / "copy" / "metrics.jsonl"
    assert (copy.read_bytes() if copy.exists() else b"") == log
    assert ada.get(f"/{project}/runs/1").status == 200 == ada.get(f"/{project}/").status


@pytest.mark.slow
def test_names_with_slashes_and_of_a_thousand_characters(project, ada, tmp_path):
    for name in ("a/b\\c", "x" * 1000, "<script>alert(1)</script>", "same", "same", "é\t\u202e"):
        push(write_run(tmp_path / str(len(list(tmp_path.iterdir()))), name=name, files=0))
    text = ada.get(f"/{project}/").text
    assert "a/b\\c" in text and "x" * 200 in text and "x" * 201 not in text and "<script>alert" not in text
    assert text.count(">same</a>") == 2
    deep = tmp_path / "deep"
    write_run(deep, files=0)
    path = deep / "/".join(["d" * 200] * 4)
    path.mkdir(parents=True)
    (path / ("f" * 100)).write_text("deep")
    (path / ("f" * 250)).write_text("too deep")
    outcome = push(deep)
    assert outcome.left_out == 1 and "more than 1000 characters" in outcome.lines[0]
    pull(7, tmp_path / "copy")
    (path / ("f" * 250)).unlink()
    assert contents(tmp_path / "copy") == contents(deep)


def test_links_and_pipes_are_left_out_and_said(project, tmp_path):
    folder = write_run(tmp_path / "small", files=0)
    (tmp_path / "secret").write_text("of another folder")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    (folder / "folder").symlink_to(tmp_path)
    outcome = push(folder)
    assert outcome.left_out == 3
    pull(1, tmp_path / "copy")
    assert not (tmp_path / "copy" / "link").exists()


def test_a_file_that_keeps_changing_is_left_out_and_the_others_arrive(project, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "small", files=0)
    (folder / "wild.bin").write_bytes(os.urandom(100))
    send = pushing.send_chunks

    def change(connection, snapshots):
        (folder / "wild.bin").write_bytes(os.urandom(100))
        return send(connection, snapshots)

    monkeypatch.setattr(pushing, "send_chunks", change)
    outcome = push(folder)
    assert outcome.left_out == 1 and "wild.bin: it keeps changing" in outcome.lines[0]
    pull(1, tmp_path / "copy")
    assert (tmp_path / "copy" / "run.toml").read_bytes() == (folder / "run.toml").read_bytes()


# -- what the hub refuses ---------------------------------------------------------------------------------------------


@pytest.fixture
def connection(project):
    return Connection(login_for(), patience=0.0)


KEY = "ab" * 16


def refused(connection, *request, **query):
    with pytest.raises(HubError) as error:
        connection.ask(*request, **query)
    return error.value


def test_a_chunk_is_stored_under_its_own_digest_only(connection):
    assert refused(connection, "PUT", f"chunks/{digest(b'right')}", b"wrong").status == 400
    for _ in range(2):
        connection.ask("PUT", f"chunks/{digest(b'right')}", b"right")
    missing = connection.ask("POST", "chunks/missing", {"digests": [digest(b"right"), digest(b"wrong"), "../x", 7]})
    assert missing == {"missing": [digest(b"wrong")]}
    assert refused(connection, "PUT", f"chunks/{digest(b'x')}", b"x" * (CHUNK + 1)).status == 413


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../x", "a//b", "", ".", "a\0b", "metrics.jsonl", "x" * 1001, 7]
)
def test_paths_that_no_run_folder_has_are_refused(connection, path):
    connection.ask("POST", f"own/{KEY}", {"name": "run"})
    file = {"path": path, "size": 0, "chunks": []}
    assert refused(connection, "POST", f"own/{KEY}/files", {"files": [file]}).status == 400


def test_files_of_chunks_that_do_not_fit_are_refused(connection):
    connection.ask("POST", f"own/{KEY}", {"name": "run"})
    connection.ask("PUT", f"chunks/{digest(b'x')}", b"x")
    for size, chunks, status in ((2, [digest(b"x")], 400), (1, [digest(b"y")], 409), (1, ["x"], 400), (1, [], 400)):
        file = {"path": "file", "size": size, "chunks": chunks}
        assert refused(connection, "POST", f"own/{KEY}/files", {"files": [file]}).status == status
    for size in (CHUNK + 1, -1, 1e9, None, "1"):
        file = {"path": "file", "size": size, "chunks": [digest(b"x")] * 2}
        assert refused(connection, "POST", f"own/{KEY}/files", {"files": [file]}).status == 400


def test_bodies_that_are_no_json_objects_are_refused(connection):
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"files": 7}'):
        connection.ask("POST", f"own/{KEY}", {"name": "run"})
        assert refused(connection, "POST", f"own/{KEY}/files", body).status == 400


def test_a_write_to_the_log_needs_the_size_and_the_attempt_that_the_hub_has(connection):
    first = connection.ask("POST", f"own/{KEY}", {"name": "run", "begin": True})
    put = lambda data, **query: connection.ask("PUT", f"own/{KEY}/log", data, **query)  # noqa: E731
    assert put(b"abc\n", at=0, have=0, attempt=first["attempt"]) == {"size": 4}
    assert refused(connection, "PUT", f"own/{KEY}/log", b"abc\n", at=0, have=0, attempt=1).status == 409  # twice
    assert refused(connection, "PUT", f"own/{KEY}/log", b"x", at=9, have=4, attempt=1).status == 400
    assert refused(connection, "PUT", f"own/{KEY}/log", b"x", at=-1, have=4, attempt=1).status == 400
    assert refused(connection, "PUT", f"own/{KEY}/log", b"x", at="", have=4, attempt=1).status == 400
    connection.ask("POST", f"own/{KEY}", {"name": "run", "begin": True})
    late = refused(connection, "PUT", f"own/{KEY}/log", b"late\n", at=4, have=4, attempt=1)
    assert late.status == 409 and late.facts["attempt"] == 2
    assert put(b"", at=2, have=4, attempt=2) == {"size": 2}


# -- what the client refuses ------------------------------------------------------------------------------------------


def test_a_pull_refuses_the_folder_of_another_run(project, tmp_path):
    push(write_run(tmp_path / "small", files=0))
    other = write_run(tmp_path / "other", files=0)
    with pytest.raises(ConfigError, match="is not the folder of this run"):
        pull(1, other)


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "a/../../escaped"])
def test_a_hub_that_names_paths_outside_of_the_folder_is_refused(path):
    with pytest.raises(DataError, match="the hub names a file"):
        pulling._checked({"path": path, "size": 0, "chunks": []})


def test_a_token_is_never_sent_without_tls_to_another_machine():
    from shoestring_hub.client.logins import Login

    with pytest.raises(ConfigError, match="without TLS"):
        Connection(Login("http://hub.example.org", "t"))


def test_without_a_login_the_error_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["hub", "push", str(write_run(tmp_path / "small"))]) == 2
    assert "there is no login to a hub" in capsys.readouterr().err
