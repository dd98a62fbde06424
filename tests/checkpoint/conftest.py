"""Starts of one run in one folder."""

from dataclasses import replace

import pytest

from shoestring.checkpoint.tiers import file_acts
from shoestring.checkpoint.tiers.file_acts import Files
from tests.rigs.checkpointing.known import build_checkpointer


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Makes starts of one run, which all end at the end; (checkpointer, state, progress) each."""
    monkeypatch.setattr(file_acts, "WAIT", 0.2)
    checkpointers = []

    def begin(acts=None, memory="", keep=1):
        checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, acts or Files())
        checkpointer.settings = checkpointer.keeper.settings = replace(checkpointer.settings, keep=keep)
        checkpointers.append(checkpointer)
        return checkpointer, state, progress

    yield begin
    for checkpointer in checkpointers:
        checkpointer.close()


@pytest.fixture
def saves(tmp_path):
    return tmp_path / "disk/run/saves"
