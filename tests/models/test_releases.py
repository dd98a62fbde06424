"""The oldest and the newest release of transformers that pyproject.toml names, through a slice of the matrix of models.

Each release is installed into a temporary folder, with the versions of tokenizers and huggingface_hub that it needs,
and runs in a process of its own; the whole matrix is `python -m benchmarks.models --release NUMBER`.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.models import zoo
from benchmarks.models.__main__ import NEWEST, OLDEST, install
from benchmarks.models.columns import COLUMNS

pytestmark = pytest.mark.slow  # a release is installed

ROOT = Path(__file__).parents[2]
CASES = ("mistral", "deepseek_v2", "mamba", "mixtral", "llama, yarn", "phi3, longrope")
"""A window, latent attention, a recurrent state, a mixture, and two kinds of scaled positions."""
PROMISES = ("tokens", "batches", "cache", "saved", "LoRA")


def test_the_releases_are_the_ends_of_the_range_in_pyproject():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]
    (bounds,) = [match.groups() for name in packages if (match := re.fullmatch(r"transformers>=(.+),<(.+)", name))]
    assert OLDEST.startswith(f"{bounds[0]}.")
    before, after = (tuple(map(int, number.split(".")[:2])) for number in (NEWEST, bounds[1]))
    assert (before[0], before[1] + 1) == after
    assert set(CASES) <= set(zoo.CASES) and set(PROMISES) <= set(COLUMNS)


@pytest.mark.parametrize("release", [OLDEST, pytest.param(NEWEST, marks=pytest.mark.all_cases)])
def test_models_keep_their_promises_with_the_ends_of_the_range(release, tmp_path):
    pytest.importorskip("transformers")
    if reason := install(release, tmp_path):
        pytest.skip(f"transformers {release} cannot be installed here: {reason}")
    program = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "src")!r}, {str(ROOT)!r}]
import transformers
assert transformers.__version__ == {release!r}, transformers.__version__
from benchmarks.models.__main__ import command
sys.exit(command(["--cases", *{CASES!r}, "--columns", *{PROMISES!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    # A case is no family that this release lacks, which the matrix would leave out. Some names stand for several.
    (count,) = set(re.findall(r"^ *(\d+)/\1 ", done.stdout, re.MULTILINE))
    assert int(count) >= len(CASES)
