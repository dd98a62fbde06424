"""What a program takes to import packages is in no line of it and in no share."""

import importlib
import sys

import pytest

from shoestring.profile.lines import IMPORTS, by_line, import_time, without_imports
from shoestring.profile.python_samples import _IMPORTING, Samples
from shoestring.profile.recording import Facts, Profile
from shoestring.profile.summary import summary
from shoestring.profile.tree import TreeBuilder

SEEN = Samples()


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A package that is installed, and a module of the program's own that imports it; each is sampled twice."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    sample = "import sys\nfrom test_imports import SEEN\nSEEN.add(sys._getframe())\nSEEN.add(sys._getframe())\n"
    (installed / "slow_package.py").write_text(sample)
    (tmp_path / "own_module.py").write_text(f"import slow_package\n{sample}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(installed), *sys.path])
    monkeypatch.setitem(sys.modules, "test_imports", sys.modules[__name__])
    yield tmp_path
    for name in ("slow_package", "own_module"):
        sys.modules.pop(name, None)


def test_packages_are_apart_and_modules_of_the_program_are_not(modules):
    importlib.import_module("own_module")
    builder = TreeBuilder()
    SEEN.share_out(builder, 8e9)
    tree = builder.build()
    assert tree.inclusive[0] == 8e9
    assert import_time(tree) == 4e9
    assert without_imports(tree) == 4e9
    lines = {(file, line): found.python for (file, line), found in by_line(tree).items()}
    assert lines == {(str(modules / "own_module.py"), 4): 2e9, (str(modules / "own_module.py"), 5): 2e9}
    text = "\n".join(summary(Profile(tree, Facts(seconds=8.0))))
    assert "importing packages took 4 s" in text
    assert text.count(" 50%") == 2
    assert IMPORTS not in text


def test_rare_lines_of_the_program_keep_their_time_however_much_is_imported(modules):
    seen, frame = Samples(), sys._getframe()
    seen.counts[0], seen.known = 0, {}
    for _ in range(3):
        seen.add(frame)
    seen.known[0, *_IMPORTING] = len(seen.counts)
    seen.counts.append(997)
    builder = TreeBuilder()
    seen.share_out(builder, 1e9)
    (own,) = [own.python for (file, _), own in by_line(builder.build()).items() if file == __file__]
    assert own == pytest.approx(3e6, rel=1e-6)
