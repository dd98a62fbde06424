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
    assert sorted(path.name for path in there.iterdir()) == ["environment.json", "run.toml"]
    with ExitStack() as third:
        assert run_folder.claim(run, third) == there
        run_folder.release(there)  # it ended before its first step
    assert not there.exists()


def test_two_starts_of_a_run_without_a_folder_get_one_each(run, monkeypatch):
    """Also where one finds the folder of the other free, and locks it when that one has ended."""
    run = replace(run, settings=replace(run.settings, resume=False, folder=""))
    lock, other = run_folder._locked, ExitStack()

    def late(path):
        monkeypatch.setattr(run_folder, "_locked", lock)
        with ExitStack() as stack:
            assert str(run_folder.claim(run, stack)) == "runs/task"
        return lock(path)

    monkeypatch.setattr(run_folder, "_locked", late)
    with other:
        assert str(run_folder.claim(run, other)) == "runs/task-2"
