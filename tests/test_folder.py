"""One start at a time has a run folder."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from shoestring import folder
from shoestring.checkpoint import files
from shoestring.core.errors import ConfigError
from shoestring.run import Run, Settings


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "WAIT", 0.1)
    return Run(name="task", settings=Settings(resume="auto", folder="here"))


def test_a_run_folder_that_is_in_use_is_refused_and_left_as_it_is(run, tmp_path):
    with ExitStack() as first:
        there = folder.claim(run, first)
        before = {path.name: path.read_bytes() for path in there.iterdir()}
        with ExitStack() as second, pytest.raises(ConfigError, match="`here` is in use by process "):
            folder.claim(run, second)
        assert {path.name: path.read_bytes() for path in there.iterdir()} == before
    assert sorted(path.name for path in there.iterdir()) == ["environment.json", "run.toml"]
    with ExitStack() as third:
        assert folder.claim(run, third) == there
        folder.release(there)  # it ended before its first step
    assert not there.exists()


def test_two_starts_of_a_run_without_a_folder_get_one_each(run, monkeypatch):
    """Also where one finds the folder of the other free, and locks it when that one has ended."""
    run = replace(run, settings=replace(run.settings, resume=False, folder=""))
    lock, other = folder._locked, ExitStack()

    def late(path):
        monkeypatch.setattr(folder, "_locked", lock)
        with ExitStack() as stack:
            assert str(folder.claim(run, stack)) == "runs/task"
        return lock(path)

    monkeypatch.setattr(folder, "_locked", late)
    with other:
        assert str(folder.claim(run, other)) == "runs/task-2"
