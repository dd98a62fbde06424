"""The kernels do what torch's operations do: interpreted, on a GPU if there is one; and they compile without one."""

from pathlib import Path

import bucket_kernel_checks
import fused_kernel_checks
import guard_kernel_checks
import lowrank_kernel_checks
import pytest
import ternary_kernel_checks
import torch

from tests.kernel_scripts import needs_triton, output_of

HERE = Path(__file__).parent
CHECKS = [fused_kernel_checks, lowrank_kernel_checks, bucket_kernel_checks, ternary_kernel_checks, guard_kernel_checks]


@needs_triton
@pytest.mark.parametrize("checks", CHECKS)
def test_interpreted(checks):
    assert output_of(HERE / f"{checks.__name__}.py", TRITON_INTERPRET="1") == "as it must be\n"


@needs_triton
def test_they_compile(tmp_path):
    assert output_of(HERE / "kernels_compile.py", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("checks", CHECKS)
def test_on_a_gpu(checks):
    checks.main("cuda")
