"""A current folder with code that is nowhere else."""

import sys

import pytest

from tests.commands.strangers import OWN, PACKAGE


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with modules that are nowhere else, which leave a mark where they are imported."""
    (tmp_path / "intruder.py").write_text(OWN)
    (tmp_path / "intruding").mkdir()
    (tmp_path / "intruding" / "__init__.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path
    for name in ("intruder", "intruding"):
        sys.modules.pop(name, None)
