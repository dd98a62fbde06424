"""What tests of tracing share."""

import shutil
import sysconfig
from pathlib import Path

import pytest

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") and HEADERS.is_file()), reason="needs a C++ compiler and Python's headers"
)
