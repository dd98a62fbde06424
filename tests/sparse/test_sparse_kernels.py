"""The kernels do what torch's operations do: interpreted, on a GPU if there is one; and they compile without one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import kernel_checks
import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def script(name: str, **environment: str) -> str:
    """What a script beside this file prints."""
    command = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_interpreted():
    assert script("kernel_checks.py", TRITON_INTERPRET="1") == "as it must be\n"


@needs_triton
def test_they_compile(tmp_path):
    name = Path(__file__).with_name("sparse_kernels_compile.py")
    assert script(str(name), TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    kernel_checks.main("cuda")
