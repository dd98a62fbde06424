"""The kernels do what torch's operations do: interpreted, on a GPU if there is one; and they compile without one."""

from pathlib import Path

import kernel_checks
import pytest
import torch

from tests.kernel_scripts import needs_triton, output_of

HERE = Path(__file__).parent


@needs_triton
def test_interpreted():
    assert output_of(HERE / "kernel_checks.py", TRITON_INTERPRET="1") == "as it must be\n"


@needs_triton
def test_they_compile(tmp_path):
    assert output_of(HERE / "sparse_kernels_compile.py", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    kernel_checks.main("cuda")
