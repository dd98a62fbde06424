"""Where the cache of samples lies in tests."""

import pytest

from shoestring.data.cache import Shared


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr("shoestring.data.cache.MEMORY", tmp_path)
    monkeypatch.setattr(Shared.__init__, "__defaults__", (tmp_path,))
    return tmp_path
