"""One start at a time has a run folder."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from shoestring.checkpoint.tiers import file_acts
from shoestring.core.errors import ConfigError
from shoestring.run import Run, Settings
from shoestring.training import run_folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_acts, "WAIT", 0.1)
    return Run(name="task", settings=Settings(resume="auto", folder="here"))


def test_a_run_folder_that_is_in_use_is_refused_and_left_as_it_is(run, tmp_path):
    with ExitStack() as first:
        there = run_folder.claim(run, first)
        before = {path.name: path.read_bytes() for path in there.iterdir()}
        with ExitStack() as second, pytest.raises(ConfigError, match="`here` is in use by process "):
            run_folder.claim(run, second)
        assert {path.name: path.read_bytes() for path in there.iterdir()} == before
    assert not there.exists()


@pytest.mark.parametrize("resume", ["auto", False])
def test_a_run_that_was_killed_before_its_first_step_is_in_nobodys_way(run, resume):
    with ExitStack() as killed:
        there = run_folder.claim(run, killed)
        left = {path.name: path.read_bytes() for path in there.iterdir()}
    there.mkdir()
    for name, content in left.items():
        (there / name).write_bytes(content)
    run = replace(run, settings=replace(run.settings, resume=resume))
    with ExitStack() as again:
        assert run_folder.claim(run, again) == there
        (there / "metrics.jsonl").write_text('{"step": 1}\n')
    if resume is False:
        with ExitStack() as third, pytest.raises(ConfigError, match="`here` holds a run already"):
            run_folder.claim(run, third)
    assert (there / "run.toml").is_file()


def test_a_run_that_ends_before_its_first_step_leaves_no_folder(run):
    with ExitStack() as stack:
        there = run_folder.claim(run, stack)
        assert there.is_dir()
    assert not there.exists()


@pytest.mark.parametrize("resume", ["auto", False])
def test_a_run_file_that_no_run_wrote_is_neither_replaced_nor_deleted(run, tmp_path, resume):
    """A run whose folder is the one of its own run file."""
    run = replace(run, settings=replace(run.settings, resume=resume))
    own = "# by hand\n" + run.toml
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "run.toml").write_text(own)
    with ExitStack() as stack, pytest.raises(ConfigError):
        run_folder.claim(run, stack)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run.toml"]
    assert (tmp_path / "here" / "run.toml").read_text() == own


def test_two_starts_of_a_run_without_a_folder_get_one_each(run, monkeypatch):
    """Also where one finds the folder of the other free, and locks it when that one has ended."""
    run = replace(run, settings=replace(run.settings, resume=False, folder=""))
    lock, other = run_folder._locked, ExitStack()

    def late(path):
        monkeypatch.setattr(run_folder, "_locked", lock)
        with ExitStack() as stack:
            folder = run_folder.claim(run, stack)
            assert str(folder) == "runs/task"
            (folder / "metrics.jsonl").write_text('{"step": 1}\n')  # else its folder would be gone at its end
        return lock(path)

    monkeypatch.setattr(run_folder, "_locked", late)
    with other:
        assert str(run_folder.claim(run, other)) == "runs/task-2"
