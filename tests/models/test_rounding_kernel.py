"""Weights of 8 and 4 bits in floating point by a kernel: interpreted, compiled, and on a GPU if there is one."""

from pathlib import Path

import pytest
import torch

from tests.kernel_scripts import needs_triton, output_of

HERE = Path(__file__).parent


@needs_triton
def test_interpreted():
    assert output_of(HERE / "rounding_kernel_checks.py", TRITON_INTERPRET="1") == "as it must be\n"


@needs_triton
def test_it_compiles(tmp_path):
    assert output_of(HERE / "rounding_kernel_compiles.py", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    from rounding_kernel_checks import main

    main("cuda")
