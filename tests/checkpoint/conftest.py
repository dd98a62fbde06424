"""Starts of one run in one folder."""

from dataclasses import replace

import pytest

from shoestring.checkpoint.tiers import file_acts
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.testing.checkpointing.known import engine_of


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Makes starts of one run, which all end at the end; (engine, state, progress) each."""
    monkeypatch.setattr(file_acts, "WAIT", 0.2)
    engines = []

    def begin(acts=None, memory="", keep=1):
        engine, state, progress = engine_of(tmp_path / "disk", 0, 1, acts or Files())
        engine.settings = engine.keeper.settings = replace(engine.settings, keep=keep)
        engines.append(engine)
        return engine, state, progress

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture
def saves(tmp_path):
    return tmp_path / "disk/run/saves"
