"""Slots in a place for all users are this user's alone: what others put there is neither written to nor believed."""

import logging
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from shoestring import checkpoint
from shoestring.checkpoint.tiers.slots import seals, slots_folder
from shoestring.core.errors import ShoestringError
from shoestring.core.world import World
from shoestring.storage.guarded import open_regular, private_folder
from shoestring.verbs import archive

OTHER = 65534
USER = f"shoestring-{os.geteuid()}"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def place():
    """A folder like /dev/shm, in which everybody may make files, and nobody remove another one's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_another_user(work):
    """Do something in a process of another user; whether that was allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: the child uses none
        child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            work()
            code = 0
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 13)
    return code == 0


def attached(folder, place, **state):
    settings = checkpoint.Tiered(folder=str(folder), memory_folder=str(place), memory_every=1, disk_every=0)
    return checkpoint.attach(state or {"model": torch.nn.Linear(40, 40)}, settings=settings)


def slots(folder, place):
    return slots_folder(checkpoint.Tiered(folder=str(folder), memory_folder=str(place)), World(), make=False)


def test_links_that_another_user_put_there_are_not_followed(place, tmp_path):
    secret = tmp_path / "thesis.txt"
    secret.write_text("four years of work")
    folder = slots(tmp_path / "saves", place)

    def links():
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        for name in ("own-0-0.private", "own-0-1.private", "own-0-2.private", "own-0-0.seal"):
            (folder / name).symlink_to(secret)

    assert as_another_user(links)
    with pytest.raises(
        ShoestringError, match=f"{USER}` is not private to this user: it belongs to user {OTHER} \\(hint"
    ):
        attached(tmp_path / "saves", place)
    assert secret.read_text() == "four years of work"
    with pytest.raises(ShoestringError, match="is not private"):
        archive.slots(checkpoint.Tiered(memory_folder=str(place)), tmp_path / "saves")


@pytest.mark.parametrize("level", range(3))
def test_a_link_in_the_place_of_a_folder_is_not_followed(level, place, tmp_path):
    (tmp_path / "home").mkdir()
    path = [place / USER, slots(tmp_path / "saves", place).parent, slots(tmp_path / "saves", place)][level]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if level:
        path.symlink_to(tmp_path / "home")
    else:
        assert as_another_user(lambda: path.symlink_to(tmp_path / "home"))
    with pytest.raises(ShoestringError, match="it is a link or a file, not a folder"):
        attached(tmp_path / "saves", place)
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("level", range(3))
def test_another_users_folder_is_refused_at_every_level(level, place, tmp_path):
    folder = slots(tmp_path / "saves", place)
    folder.mkdir(parents=True, mode=0o700)
    path = [place / USER, folder.parent, folder][level]
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ShoestringError, match=f"`{path}` is not private to this user: it belongs to user {OTHER}"):
        attached(tmp_path / "saves", place)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_could_write_to_is_refused(mode, place, tmp_path):
    (place / USER).mkdir()
    (place / USER).chmod(mode)
    with pytest.raises(ShoestringError, match=f"others may write to it \\(mode {mode:o}\\)"):
        attached(tmp_path / "saves", place)


def test_a_place_where_everybody_may_rename_is_refused(place, tmp_path):
    place.chmod(0o777)
    with pytest.raises(ShoestringError, match="everybody may rename what is in it"):
        attached(tmp_path / "saves", place)
    place.chmod(0o755)
    os.chown(place, OTHER, OTHER)
    with pytest.raises(ShoestringError, match=f"it belongs to user {OTHER}"):
        attached(tmp_path / "saves", place)


def saved(folder, place, weight):
    """Weights in this host's memory, as a process that was killed leaves them."""
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, weight)
    saves = attached(folder, place, model=model)
    saves.restore()
    saves.step()
    saves.step()
    saves.checkpointer.drain()
    saves.close()
    return slots(folder, place)


def restored(folder, place):
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, 0.0)
    with attached(folder, place, model=model) as saves:
        return saves.restore(), float(model.weight.detach()[0, 0])


def test_what_is_in_slots_is_read_by_this_user_only(place, tmp_path):
    folder = saved(tmp_path / "saves", place, 3.0)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (folder, folder.parent, folder.parent.parent))
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    for path in (place / USER, folder):
        assert not as_another_user(lambda path=path: list(path.iterdir()))
    assert not as_another_user(lambda: (folder / "own-0-0.private").read_bytes())
    assert restored(tmp_path / "saves", place) == (2, 3.0)


def test_folders_that_version_0_1_made_for_all_to_read_are_closed(place, tmp_path):
    folder = saved(tmp_path / "saves", place, 3.0)
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(0o755)
    assert restored(tmp_path / "saves", place) == (2, 3.0)
    assert stat.S_IMODE((place / USER).stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["owner", "mode", "link", "second name"])
def test_a_slot_that_may_be_another_users_is_not_believed(what, place, tmp_path):
    folder = saved(tmp_path / "saves", place, 3.0)
    for path in list(folder.iterdir()):
        if what == "owner":
            os.chown(path, OTHER, OTHER)
        elif what == "mode":
            path.chmod(0o666)
        elif what == "link":
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
        else:
            os.link(path, place / f"another-{path.name}")
    assert not list(seals(folder))
    assert restored(tmp_path / "saves", place) == (0, 0.0)


def test_a_link_in_the_place_of_a_slot_is_not_written_to(place, tmp_path, caplog):
    secret = tmp_path / "thesis.txt"
    secret.write_text("four years of work")
    folder = private_folder(place, *slots(tmp_path / "saves", place).parts[-3:])
    for number in range(3):
        (folder / f"own-0-{number}.private").symlink_to(secret)
    with caplog.at_level(logging.WARNING):
        saved(tmp_path / "saves", place, 3.0)
    assert secret.read_text() == "four years of work"
    assert any("no checkpoints to memory" in each.getMessage() for each in caplog.records)


def test_slots_that_another_user_remakes_under_a_running_process_are_not_used(place, tmp_path, caplog):
    """A cleaner removes the folder; who makes the next one of that name would read weights, or have others loaded."""
    run = slots(tmp_path / "saves", place).parent
    with attached(tmp_path / "saves", place) as saves:
        saves.restore()
        for _ in range(2):
            saves.step()
            saves.checkpointer.drain()
        shutil.rmtree(place / USER)

        def remake():
            (place / USER / run.name / "host-0").mkdir(parents=True)
            for path in (place / USER, place / USER / run.name, place / USER / run.name / "host-0"):
                path.chmod(0o777)

        assert as_another_user(remake)
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                saves.step()
                saves.checkpointer.drain()
        assert saves.checkpointer.safe["memory"] == 0
        assert not list((run / "host-0").iterdir())
    assert f"is not private to this user: it belongs to user {OTHER}" in caplog.text


def test_a_folder_is_made_for_this_user_only_whatever_the_mask(place):
    before = os.umask(0)
    try:
        folder = private_folder(place, "a", "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    assert private_folder(place, "c", "d", make=False) == place / "c/d" and not (place / "c").exists()
    with open_regular(folder / "x", private=True, write=True) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
