"""The kernels do what torch's operations do: interpreted, on a GPU if there is one; and they compile without one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fused_kernel_checks
import lowrank_kernel_checks
import pytest
import torch

CHECKS = [fused_kernel_checks, lowrank_kernel_checks]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def script(name: str, **environment: str) -> str:
    """What a script beside this file prints."""
    command = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize("checks", CHECKS)
def test_interpreted(checks):
    assert script(f"{checks.__name__}.py", TRITON_INTERPRET="1") == "as it must be\n"


@needs_triton
def test_they_compile(tmp_path):
    assert script("kernels_compile.py", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("checks", CHECKS)
def test_on_a_gpu(checks):
    checks.main("cuda")
