"""C and C++ shipped as source, compiled for this machine at first use and cached.

The C files in this folder are inner loops that no library offers; the C++ files use interfaces of torch and Python.
Without a compiler, `load` raises `CompileError`, and every caller has a fallback.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # loads the OpenMP runtime that the libraries link against

from shoestring.core.errors import ShoestringError
from shoestring.storage.guarded import private_folder
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring")

# Contraction to fused multiply-add is off, because compilers apply it to some loops and not to others; see fused.h.
FLAGS = ("-O3", "-march=native", "-fPIC", "-ffp-contract=off", "-Wall", "-Werror")
SECONDS = 300.0
"""Time limit of a compilation in seconds."""


class CompileError(ShoestringError):
    """A native library cannot be compiled or loaded, for example because there is no compiler."""


@dataclass(frozen=True)
class _Language:
    """How to compile source files of one language: the compilers to try, their options, and options for linking."""

    name: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    links: tuple[str, ...]


def _language(suffix: str) -> _Language:
    if suffix == ".c":
        # OpenMP is not linked: opening the library resolves its OpenMP symbols in torch's copy of the runtime.
        return _Language("C", ("cc", "gcc", "clang"), ("-std=c11", *FLAGS, "-fno-math-errno", "-fopenmp"), ("-lm",))
    package = Path(torch.__file__).parent
    headers = [f"-I{package / 'include'}", f"-I{sysconfig.get_path('include')}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    links = (f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10")
    # -Werror is left out, because torch's headers cause warnings. NDEBUG is set as in torch's build, because it changes
    # the layouts of classes.
    general = (flag for flag in FLAGS if flag != "-Werror")
    flags = ("-std=c++20", *general, "-DNDEBUG", "-Wno-unknown-pragmas", abi, *headers)
    return _Language("C++", ("c++", "g++", "clang++"), flags, links)


@cache
def load(name: str) -> ctypes.CDLL:
    """Load the library of the C or C++ file `name` in this package; compiles it if it is not in the cache.

    The library is compiled once for each source, compiler and processor, and C++ also for each version of torch and
    Python. Parallel loops run in torch's OpenMP thread pool, so that no second pool competes for the cores.

    Raises:
        CompileError: the library cannot be compiled or loaded on this machine.
    """
    source, language, compiler = _found(name)
    try:
        path = _path(source, language, compiler)
        with _lock(name):
            if not path.is_file():
                _compile(compiler, language, source, path)
        return _open(path, compiler, language, source)
    except OSError as error:  # for example, the disk is full
        raise CompileError(f"`{source.name}` cannot be compiled: {error}") from error


@cache
def _lock(name: str) -> threading.Lock:
    """The lock that is held while a library is compiled, so that other threads wait instead of compiling it too."""
    return threading.Lock()


def compile_ahead(*names: str) -> None:
    """Start compiling all libraries that are not in the cache, each in a background thread."""

    def attempt(name: str) -> None:
        with suppress(CompileError):  # the caller that needs the library reports the error
            load(name)

    for name in names:
        if not is_built(name):
            threading.Thread(target=attempt, args=(name,), daemon=True).start()


def names() -> list[str]:
    """The names of all libraries."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.c*") if path.suffix in (".c", ".cpp"))


def is_built(name: str) -> bool:
    """Whether a library is in the cache, so that `load` does not have to compile it."""
    try:
        source, language, compiler = _found(name)
        return _path(source, language, compiler).is_file()
    except (CompileError, OSError):
        return False


def folder() -> Path:
    """The folder of compiled libraries; only this user can write to it, because its libraries are executed."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home raises if there is none)
    with suppress(OSError, ShoestringError):
        if home.is_absolute():  # a relative path would depend on the current folder, which others may own
            return private_folder(home / ".cache", "shoestring", "native")
    return private_folder(Path(tempfile.gettempdir()), f"shoestring-native-{os.geteuid()}")


def function(name: str, arguments: Sequence[Any], otherwise: str, file: str = "") -> Any:
    """Load the C function `name`, which returns void.

    Args:
        arguments: ctypes types of the function's arguments.
        otherwise: text of the warning if the function cannot be compiled; it says what happens without the function.
        file: name of the source file that contains the function, without suffix; defaults to `name`.

    Returns:
        The function; None, after a warning, if it cannot be compiled.
    """
    try:
        loaded = getattr(load(file or name), name)
    except CompileError as error:
        log.warning("%s: %s", otherwise, error)
        return None
    loaded.argtypes, loaded.restype = list(arguments), None
    return loaded


def source_of(name: str) -> Path:
    """The source file of a library."""
    return next(Path(__file__).parent.glob(f"{name}.c*"))


def compiler_of(name: str) -> str | None:
    """The path of a compiler for a library; None if this machine has none."""
    compilers = _language(source_of(name).suffix).compilers
    return next((path for name in compilers if (path := shutil.which(name))), None)


def _found(name: str) -> tuple[Path, _Language, str]:
    """The source file of a library, its language, and the path of a compiler."""
    source, compiler = source_of(name), compiler_of(name)
    language = _language(source.suffix)
    if compiler is None:
        raise CompileError(
            f"`{source.name}` needs a {language.name} compiler, but none is on the PATH", hint="install g++"
        )
    return source, language, compiler


def _path(source: Path, language: _Language, compiler: str) -> Path:
    return folder() / f"{source.stem}-{_key(source, compiler, language)}.so"


def _key(source: Path, compiler: str, language: _Language) -> str:
    """Hash all inputs of a library, including the processor, because several machines may share a home folder."""
    status = Path(compiler).resolve().stat()
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    headers = "".join(path.read_text() for path in sorted(source.parent.glob("*.h")))
    parts = (
        source.read_text(),
        headers,
        compiler,
        str(status.st_size),
        str(status.st_mtime_ns),
        processor,
        *language.flags,
    )
    if language.name == "C++":
        parts += (torch.__version__, sys.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, language: _Language, source: Path, path: Path, *more: str) -> None:
    """Compile the file `source` and link it to the library `path`; `more` are further linker options."""
    with tempfile.TemporaryDirectory() as folder:
        unlinked, built = Path(folder, "object.o"), Path(folder, "library.so")
        steps = (
            [compiler, *language.flags, "-c", str(source), "-o", str(unlinked)],
            [compiler, "-shared", *more, str(unlinked), "-o", str(built), *language.links],
        )
        for command in steps:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired as error:
                raise CompileError(f"`{source.name}` cannot be compiled: {error}") from error
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"{compiler} ended with {done.returncode}"]
                first = next((line for line in lines if "error:" in line), lines[0])
                raise CompileError(f"`{source.name}` cannot be compiled: {first}")
        write_atomic(path, built.read_bytes())


def _open(path: Path, compiler: str, language: _Language, source: Path) -> ctypes.CDLL:
    """Load a library and resolve all its symbols now, so that a missing symbol fails here and not in a later call."""
    now = os.RTLD_NOW
    try:
        return ctypes.CDLL(str(path), mode=now)
    except OSError:  # torch's OpenMP symbols are not visible in this process; link the compiler's OpenMP
        own = path.with_stem(f"{path.stem}-openmp")
        if not own.is_file():
            _compile(compiler, language, source, own, "-fopenmp")
        try:
            return ctypes.CDLL(str(own), mode=now)
        except OSError as error:
            raise CompileError(f"`{source.name}` cannot be loaded: {error}") from error
