"""The guide's feature passes the guide's test, as a user would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoestring
from shoestring.testing import CLAUSES

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "write-a-feature.md"


@pytest.mark.slow
def test_the_guides_feature_passes_the_suite(tmp_path: Path) -> None:
    feature, test = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "noise.py").write_text(feature)
    (tmp_path / "test_noise.py").write_text(test)
    environment = {**os.environ, "PYTHONPATH": str(Path(shoestring.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_noise.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout
    # It attaches at STEP, of which the clause on features at MODEL says nothing.
    assert f"{len(CLAUSES) - 1} passed, 1 skipped" in done.stdout
    assert "does not change what a module computes" in done.stdout


def test_the_guide_lists_every_clause() -> None:
    assert re.findall(r"^\| `(\w+)` \|", GUIDE.read_text(), re.MULTILINE) == [each.__name__ for each in CLAUSES]
