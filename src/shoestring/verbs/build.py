"""`shoestring build`: compiles the native kernels for this machine, so that no run has to wait for compilation."""

from __future__ import annotations

import time
from collections.abc import Iterator

from shoestring import native
from shoestring.core.errors import DataError
from shoestring.figures import seconds


def build() -> Iterator[str]:
    """Compile all kernels that are not in the cache yet; yield a line for each kernel, then the folder of the cache.

    Raises:
        DataError: a kernel cannot be compiled; raised after the last line. Programs use slower code instead of
            this kernel.
    """
    failed = 0
    for name in native.names():
        began, there = time.monotonic(), native.is_built(name)
        try:
            native.load(name)
        except native.CompileError as error:
            failed += 1
            yield f"{name}: {error}"
        else:
            yield f"{name}: " + ("built before" if there else f"built in {seconds(time.monotonic() - began)}")
    yield f"in {native.folder()}"
    if failed:
        raise DataError(
            f"{failed} of {len(native.names())} kernels cannot be compiled, so slower code is used instead",
            hint="install g++ and Python's headers",
        )
