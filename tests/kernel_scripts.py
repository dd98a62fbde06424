"""Scripts that check or compile Triton kernels, each in a process of its own: Triton reads its settings once."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def output_of(script: Path, **environment: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
