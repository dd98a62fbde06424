"""For all tests of profile."""

import pytest


@pytest.fixture(autouse=True)
def assumed_errors(monkeypatch):
    """Gains have the errors that are said here, for those that were measured change with each calibration."""
    monkeypatch.setattr("shoestring.profile.analyses.gains.errors", lambda: {"": (0.0, 0.08)})
