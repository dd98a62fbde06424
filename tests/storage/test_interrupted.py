"""A folder that is replaced survives a kill before each act, as a whole and with a user's files, whoever comes next."""

import ctypes
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shoestring.models.saving import model_folder, save_model
from shoestring.storage.whole import replaced_folder
from tests.killed_acts import killed_before

MADE_BY = {"model": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 2}, "offered": {}}


@pytest.fixture(params=["exchange", "renames"])
def exchanging(request, monkeypatch):
    """Where the file system can exchange two names in one act, and where it cannot."""
    if request.param != "exchange":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    return request.param


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save(folder, text):
    """As `save_model`, with files that are quicker to compare."""
    with replaced_folder(folder, lambda name: not name.endswith(".weights")) as new:
        (new / "a.weights").write_text(text)
        (new / "adapter").mkdir()
        (new / "adapter/b.weights").write_text(text)


def content(folder):
    assert (folder / "notes/mine.txt").read_text() == "mine", names(folder)
    texts = {(folder / name).read_text() for name in ("a.weights", "adapter/b.weights")}
    assert len(texts) == 1
    return texts.pop()


def no_space(folder):
    with suppress(OSError), replaced_folder(folder, lambda _: True) as new:
        (new / "half").write_text("half")
        raise OSError(28, "No space left on device")


def begin(folder):
    save(folder, "first")
    (folder / "notes").mkdir()
    (folder / "notes/mine.txt").write_text("mine")


def check_kill(folder, number, acts):
    """Kill a writer, and another one that comes after it and is as far; look; let one fail; let one succeed."""
    begin(folder / "model")
    killed = killed_before(number, lambda: save(folder / "model", "second"), acts)
    killed_before(number, lambda: save(folder / "model", "second"), acts)
    no_space(folder / "model")
    kept = content(folder / "model")
    assert kept in ("first", "second") and names(folder) == ["model"]
    save(folder / "model", "third")
    assert content(folder / "model") == "third" and names(folder) == ["model"]
    shutil.rmtree(folder / "model")
    return killed


def test_a_kill_beside_a_rename_leaves_the_folder_and_a_users_files(tmp_path, exchanging):
    for number in itertools.count():
        if not check_kill(tmp_path, number, ("os.rename",)):
            break
    assert number == (0 if exchanging == "exchange" else 3)


@pytest.mark.slow
@pytest.mark.usefixtures("exchanging")
def test_a_kill_before_any_act_leaves_the_folder_and_a_users_files(tmp_path):
    number = 0
    while check_kill(tmp_path, number, ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes.dlsym")):
        number += 1
    assert number > 10


@pytest.mark.slow
@pytest.mark.usefixtures("exchanging")
def test_who_opens_a_model_finds_it_after_a_kill_between_two_renames(tmp_path):
    save_model(torch.nn.Linear(2, 2), None, tmp_path / "run/model", MADE_BY)
    (tmp_path / "run/model/notes.txt").write_text("mine")
    for number in itertools.count():
        work = lambda: save_model(torch.nn.Linear(2, 2), None, tmp_path / "run/model", MADE_BY)  # noqa: E731
        killed = killed_before(number, work, ("os.rename",))
        assert model_folder(tmp_path / "run") == tmp_path / "run/model"
        assert names(tmp_path / "run/model") == ["config.json", "model.safetensors", "notes.txt"]
        if not killed:
            break


def test_two_writers_at_once_leave_one_of_both_and_what_a_user_wrote(tmp_path, monkeypatch):
    """The second writer comes between the renames of the first."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    begin(tmp_path / "model")
    real, done = Path.rename, []

    def rename(path, target):
        found = real(path, target)
        if path == tmp_path / "model" and not done:
            done.append(os.fork())
            if not done[0]:
                os.closerange(3, 64)  # the first writer's locks
                monkeypatch.setattr(Path, "rename", real)
                code = 1
                try:
                    save(tmp_path / "model", "second")
                    code = 0
                finally:
                    os._exit(code)
        return found

    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path / "model", "first again")
    assert os.waitstatus_to_exitcode(os.waitpid(done[0], 0)[1]) == 0
    assert content(tmp_path / "model") == "second" and names(tmp_path) == ["model"]


def test_a_former_folder_stays_where_another_one_was_put_in_its_place(tmp_path, monkeypatch):
    """Whoever made that knows nothing of the interrupted writer: it is not the copy that replaces the former one."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    begin(tmp_path / "model")
    killed_before(1, lambda: save(tmp_path / "model", "second"), ("os.rename",))
    (tmp_path / "model").mkdir()
    save(tmp_path / "model", "third")
    (former,) = (path for path in tmp_path.iterdir() if path.name.endswith(".former"))
    assert content(former) == "first"


@pytest.mark.usefixtures("exchanging")
def test_what_a_user_puts_into_the_folder_while_it_is_replaced_stays(tmp_path):
    begin(tmp_path / "model")
    with replaced_folder(tmp_path / "model", lambda name: not name.endswith(".weights")) as new:
        (new / "a.weights").write_text("second")
        (tmp_path / "model/late.txt").write_text("late")
    assert names(tmp_path / "model") == ["a.weights", "adapter", "late.txt", "notes"]


def test_folders_that_a_failure_would_leave_above_are_removed(tmp_path):
    with pytest.raises(OSError, match="No space"), replaced_folder(tmp_path / "a/b/model"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == []
