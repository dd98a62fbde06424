"""C and C++ that ship as source: compiled for this machine at first use, and kept.

The few inner loops that no library offers are C files beside this one; what speaks to interfaces of torch and Python is
C++. A machine without a compiler gets `CompileError`, which says why; every caller has a fallback.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # brings the OpenMP that libraries are opened against

from shoestring.core.errors import ShoestringError
from shoestring.storage.guarded import private_folder
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring")

FLAGS = ("-O3", "-march=native", "-fPIC", "-ffp-contract=fast", "-Wall", "-Werror")
SECONDS = 300.0
"""The longest that a compiler may take."""


class CompileError(ShoestringError):
    """There is no compiler, or it does not take the source."""


@dataclass(frozen=True)
class _Language:
    name: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    links: tuple[str, ...]


def _language(suffix: str) -> _Language:
    if suffix == ".c":
        # Without linking OpenMP: its entry points are resolved in torch's copy when the library is opened.
        return _Language("C", ("cc", "gcc", "clang"), ("-std=c11", *FLAGS, "-fno-math-errno", "-fopenmp"), ("-lm",))
    package = Path(torch.__file__).parent
    headers = [f"-I{package / 'include'}", f"-I{sysconfig.get_path('include')}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    links = (f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10")
    # What torch's headers warn of is not ours to mend. Its classes have other members without NDEBUG.
    own = (flag for flag in FLAGS if flag != "-Werror")
    flags = ("-std=c++20", *own, "-DNDEBUG", "-Wno-unknown-pragmas", abi, *headers)
    return _Language("C++", ("c++", "g++", "clang++"), flags, links)


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of the C or C++ file `name` of this package; compiled once for what it depends on.

    That is the source, the compiler, the processor, and for C++ the versions of torch and Python. Parallel loops of C
    run in the OpenMP pool that torch has brought with it, so that no second pool competes for the cores.

    Raises:
        CompileError: it cannot be compiled or loaded here.
    """
    source = next(path for path in Path(__file__).parent.glob(f"{name}.c*"))
    language = _language(source.suffix)
    compiler = next((found for each in language.compilers if (found := shutil.which(each))), None)
    if compiler is None:
        raise CompileError(
            f"`{source.name}` needs a {language.name} compiler, and there is none on the PATH", hint="install g++"
        )
    try:
        path = _cache() / f"{name}-{_key(source, compiler, language)}.so"
        if not path.is_file():
            _compile(compiler, language, source, path)
        return _open(path, compiler, language, source)
    except OSError as error:  # a full disk, say
        raise CompileError(f"`{source.name}` cannot be compiled: {error}") from error


def function(name: str, arguments: Sequence[Any], otherwise: str, file: str = "") -> Any:
    """The C function `name`, which returns nothing.

    Args:
        arguments: their types of ctypes.
        file: that it is in, where that has another name.
        otherwise: what happens on a machine that cannot compile it, as the beginning of a warning.

    Returns:
        None on such a machine, after the warning.
    """
    try:
        found = getattr(load(file or name), name)
    except CompileError as error:
        log.warning("%s: %s", otherwise, error)
        return None
    found.argtypes, found.restype = list(arguments), None
    return found


def _cache() -> Path:
    """A folder that only this user can write to: libraries are loaded from it."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home raises where there is none)
    with suppress(OSError, ShoestringError):
        return private_folder(home / ".cache", "shoestring", "native")
    return private_folder(Path(tempfile.gettempdir()), f"shoestring-native-{os.geteuid()}")


def _key(source: Path, compiler: str, language: _Language) -> str:
    """Changes with all that the library depends on; a home may be shared by different machines."""
    found = Path(compiler).resolve().stat()
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    headers = "".join(path.read_text() for path in sorted(source.parent.glob("*.h")))
    parts = (
        source.read_text(),
        headers,
        compiler,
        str(found.st_size),
        str(found.st_mtime_ns),
        processor,
        *language.flags,
    )
    if language.name == "C++":
        parts += (torch.__version__, sys.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, language: _Language, source: Path, path: Path, *more: str) -> None:
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
                said = done.stderr.strip().splitlines() or [f"{compiler} ended with {done.returncode}"]
                first = next((line for line in said if "error:" in line), said[0])
                raise CompileError(f"`{source.name}` cannot be compiled: {first}")
        write_atomic(path, built.read_bytes())


def _open(path: Path, compiler: str, language: _Language, source: Path) -> ctypes.CDLL:
    now = os.RTLD_NOW
    try:
        return ctypes.CDLL(str(path), mode=now)
    except OSError:  # torch came without an OpenMP that this process can see: link the compiler's own
        own = path.with_stem(f"{path.stem}-openmp")
        if not own.is_file():
            _compile(compiler, language, source, own, "-fopenmp")
        try:
            return ctypes.CDLL(str(own), mode=now)
        except OSError as error:
            raise CompileError(f"`{source.name}` cannot be loaded: {error}") from error
