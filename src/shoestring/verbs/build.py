"""`shoestring build`: compiles the native kernels for this machine, so that no run, server or first request does."""

from __future__ import annotations

import time
from collections.abc import Iterator

from shoestring import native
from shoestring.core.errors import DataError
from shoestring.figures import seconds


def build() -> Iterator[str]:
    """Compile all kernels that are not in the cache yet; yields a line for each, and one that names the cache.

    Raises:
        DataError: after the last line, if a kernel cannot be compiled; programs then take a slower path.
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
            f"{failed} of {len(native.names())} kernels cannot be compiled, in whose place slower code is used",
            hint="install g++ and Python's headers",
        )
