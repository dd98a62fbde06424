"""Features of packages that are not shoestring's: a run file names the package, and its tables are there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shoestring import parallel, run
from shoestring.areas import AREAS
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.testing.clauses import _round_trip
from shoestring.verbs.check import check
from tools import reference

INIT = '''
"""Features of a package of the user's own."""
from shoestring.optim import Clip
from .noise import Base, Noise
'''
NOISE = '''
from dataclasses import dataclass, replace
from typing import ClassVar
import shoestring as ss

class Base(ss.Feature):
    """Not a technique: it is abstract."""

@dataclass(frozen=True, kw_only=True)
class Noise(Base):
    """Add Gaussian noise to the gradients."""

    scale: float = 0.01
    """Standard deviation of the noise."""
    folder: str = "noise"
    """Where the noise is written."""

    seams: ClassVar = (ss.Seam.STEP,)

    def placed(self, folder):
        return replace(self, folder=str(folder / self.folder))

    def apply(self, attachments, seam):
        pass
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder on the path with a package that has features, and others that have none or cannot be imported."""
    for name, files in {
        "acme": {"__init__.py": INIT, "noise.py": NOISE},
        "bystander": {"__init__.py": "raise AssertionError('nobody named it')"},
        "empty": {"__init__.py": ""},
        "broken": {"__init__.py": "import nosuchmodule"},
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("acme", "bystander", "empty", "broken")]:
        del sys.modules[name]


def parsed(text, *flags):
    document = tomllib.loads(text)
    run.override(document, flags)
    return run.parse(document)


OWN = '[run]\npackages = ["acme"]\n[acme.noise]\nscale = 0.5\n[optim.clip]\n'


def test_a_table_of_a_named_package_is_its_feature(package):
    resolved = parsed(OWN, "--acme.noise.scale", "0.25")
    (noise,) = [feature for feature in resolved.features if feature.name == "acme.noise"]
    assert noise.scale == 0.25 and type(noise).__module__ == "acme.noise"
    assert run.parse(tomllib.loads(resolved.toml)) == resolved
    assert _round_trip(noise) == noise
    assert "bystander" not in sys.modules


def test_a_table_can_be_opened_and_filled_by_flags_alone(package):
    resolved = parsed("", "--run.packages", '["acme"]', "--acme.noise.scale", "1")
    assert [feature.name for feature in resolved.features] == ["acme.noise"]


def test_it_applies_after_the_areas_and_is_placed_in_the_runs_folder(package):
    completed = parsed(OWN).completed(World())
    names = [feature.name for feature in completed.features]
    assert names[-1] == "acme.noise" and "optim.adamw" in names and "checkpoint.tiered" in names
    assert completed.features[-1].placed(Path("runs/own")).folder == "runs/own/noise"


def test_check_shows_it(package):
    lines = list(check(parsed(OWN)))
    assert "[acme.noise]" in lines[0] and any(line.split() == ["STEP", "acme.noise"] for line in lines)


def test_the_reference_of_a_package(package, capsys):
    assert reference.main(["acme"]) == 0
    said = capsys.readouterr().out
    assert "## [acme.noise]\n\nAdd Gaussian noise to the gradients." in said
    assert "| `scale` | a number | `0.01` | Standard deviation of the noise. |" in said
    assert "clip" not in said and "base" not in said


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[acme.noise]", "unknown table [acme]", "`run.packages` opens tables of other packages"),
        ('[run]\npackages = ["acme"]\n[acne.noise]', "unknown table [acne]", "did you mean `acme`?"),
        ('[run]\npackages = ["acme"]\n[acme.nois]', "unknown technique [acme.nois]", "did you mean `noise`?"),
        ('[run]\npackages = ["acme"]\n[acme.clip]', "unknown technique [acme.clip]", "valid: noise"),
        ('[run]\npackages = ["acme"]\n[acme.noise]\nscael = 1', "unknown key `scael` in [acme.noise]", "`scale`"),
        ('[run]\npackages = ["empty"]', "the package `empty` of `run.packages` exports no feature", "import empty"),
        ('[run]\npackages = ["nosuch"]', "cannot import `nosuch`: ModuleNotFoundError", "is it installed"),
        ('[run]\npackages = ["broken"]', "cannot import `broken`: ModuleNotFoundError", "is it installed"),
        ('[run]\npackages = ["acme.noise"]', "takes names of packages, not `acme.noise`", "`acme`"),
        ('[run]\npackages = ["comm"]', "names `comm`, which is a name that shoestring uses itself", ""),
        ('[run]\npackages = ["data"]', "names `data`, which is a name that shoestring uses itself", ""),
        ('[run]\npackages = "acme"', "`run.packages` must be a list of strings", ""),
    ],
)
def test_what_is_wrong_is_named(package, text, message, hint):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert message in str(caught.value) and hint in caught.value.hint


@pytest.mark.slow
def test_the_command_line_reads_a_package_beside_it(package, monkeypatch):
    (package / "own.toml").write_text(OWN)
    command = [sys.executable, "-m", "shoestring", "check", "own.toml", "--acme.noise.scale", "2"]
    monkeypatch.chdir(package)
    assert main(["trust", "own.toml"]) == 0
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "[acme.noise]\nscale = 2" in done.stdout


def test_the_areas_are_listed_alike_wherever_tools_need_them_written_out():
    """The one list is `AREAS`; an import contract and a type checker read theirs as text."""
    root = Path(run.__file__).parents[2]
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert " | ".join(sorted([*AREAS, "tune"])) in contract["layers"]  # which has no features: it runs runs
    public = (root / "src/shoestring/__init__.py").read_text()
    listed = re.search(r"    from shoestring import \(?([\w\s,]+?),?\s*\)?\n    from", public)
    assert listed and [name.strip() for name in listed[1].split(",")] == sorted(AREAS)
    for area in AREAS:
        assert all(kind.__module__.startswith(f"shoestring.{area}") for kind in run.techniques(area).values())
    assert parallel.DDP().name == "parallel.ddp"
