"""C that ships as source: compiled for this machine at first use, and kept.

The few inner loops that no library offers are C files beside this one. A machine without a compiler gets
`CompileError`, which says why; every caller has a fallback in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (brings the OpenMP that libraries are opened against)

from shoestring.core.errors import ShoestringError
from shoestring.storage.guarded import private_folder
from shoestring.storage.whole import write_atomic

FLAGS = ("-O3", "-march=native", "-std=c11", "-fPIC", "-ffp-contract=fast", "-Wall", "-Werror")
SECONDS = 120.0
"""The longest that a compiler may take."""


class CompileError(ShoestringError):
    """There is no compiler, or it does not take the source."""


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of the C file `name` of this package; compiled once for this source, compiler and processor.

    Parallel loops run in the OpenMP pool that torch has brought with it, so that no second pool competes for the cores.

    Raises:
        CompileError: it cannot be compiled or loaded here.
    """
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CompileError(f"`{source.name}` needs a C compiler, and there is none on the PATH", hint="install gcc")
    try:
        path = _cache() / f"{name}-{_key(source, compiler)}.so"
        if not path.is_file():
            _compile(compiler, source, path)
        return _open(path, compiler, source)
    except OSError as error:  # a full disk, say
        raise CompileError(f"`{source.name}` cannot be compiled: {error}") from error


def _cache() -> Path:
    """A folder that only this user can write to: libraries are loaded from it."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home raises where there is none)
    with suppress(OSError, ShoestringError):
        return private_folder(home / ".cache", "shoestring", "native")
    return private_folder(Path(tempfile.gettempdir()), f"shoestring-native-{os.geteuid()}")


def _key(source: Path, compiler: str) -> str:
    """Changes with the source, the compiler, and the processor (a home may be shared by different machines)."""
    found = Path(compiler).resolve().stat()
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = (source.read_text(), compiler, str(found.st_size), str(found.st_mtime_ns), processor, *FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, source: Path, path: Path, *more: str) -> None:
    """Compile without linking OpenMP: its entry points are resolved in torch's copy when the library is opened."""
    with tempfile.TemporaryDirectory() as folder:
        unlinked, built = Path(folder, "object.o"), Path(folder, "library.so")
        steps = (
            [compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", str(unlinked)],
            [compiler, "-shared", *more, str(unlinked), "-o", str(built), "-lm"],
        )
        for command in steps:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired as error:
                raise CompileError(f"`{source.name}` cannot be compiled: {error}") from error
            if done.returncode:
                first = next(iter(done.stderr.strip().splitlines()), f"{compiler} ended with {done.returncode}")
                raise CompileError(f"`{source.name}` cannot be compiled: {first}")
        write_atomic(path, built.read_bytes())


def _open(path: Path, compiler: str, source: Path) -> ctypes.CDLL:
    now = os.RTLD_NOW
    try:
        return ctypes.CDLL(str(path), mode=now)
    except OSError:  # torch came without an OpenMP that this process can see: link the compiler's own
        own = path.with_stem(f"{path.stem}-openmp")
        if not own.is_file():
            _compile(compiler, source, own, "-fopenmp")
        try:
            return ctypes.CDLL(str(own), mode=now)
        except OSError as error:
            raise CompileError(f"`{source.name}` cannot be loaded: {error}") from error
