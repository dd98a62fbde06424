"""Packages that need not be installed: a folder of their name, as in somebody's project, is none of them."""

import importlib
import types

import pytest

from shoestring.core.errors import ShoestringError
from shoestring.models.gguf_weights import gguf_library
from shoestring.naming import installed
from shoestring.report.trackers import Trackio, Wandb
from shoestring.sharded import is_sharded


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Empty folders called like packages, in a path that holds nothing else of them."""
    import sys

    names = "dlib", "gguf", "trackio", "wandb"
    for name in names:
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    elsewhere = [path for path in sys.path if not path.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *elsewhere])
    importlib.invalidate_caches()
    yield names
    for name in names:
        sys.modules.pop(name, None)


def test_a_folder_of_the_name_is_no_package(folders, tmp_path):
    assert not any(map(installed, folders)) and installed("json") and not installed("no_such_package")
    for tracker in (Wandb, Trackio):
        with pytest.raises(ShoestringError, match="is not installed"):
            tracker(tmp_path, "run", {})
    with pytest.raises(ShoestringError, match="need the package gguf"):
        gguf_library()


def test_a_module_that_is_half_imported_has_made_no_tensor(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    assert not is_sharded(object())
