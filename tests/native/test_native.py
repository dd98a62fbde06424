import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoestring import native
from shoestring.core.errors import DataError
from shoestring.verbs.build import build


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def source(tmp_path: Path, text: str, monkeypatch) -> None:
    """Put a C file in the place of the package's."""
    (tmp_path / "twice.c").write_text(text)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))


TWICE = """
int twice(int x) {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 2; i++) sum += x;
    return sum;
}"""


def test_a_library_is_compiled_once_and_kept(home, monkeypatch):
    source(home, TWICE, monkeypatch)
    assert native.load("twice").twice(21) == 42
    (built,) = (home / ".cache/shoestring/native").iterdir()
    written = built.stat().st_mtime_ns
    native.load.cache_clear()
    assert native.load("twice").twice(4) == 8
    assert built.stat().st_mtime_ns == written
    assert (home / ".cache/shoestring/native").stat().st_mode & 0o777 == 0o700


def test_what_is_compiled_ahead_is_compiled_once_and_waited_for(home, monkeypatch):
    source(home, TWICE, monkeypatch)
    compiled, go_on, compile_library = [], threading.Event(), native._compile

    def counted(*arguments):
        compiled.append(threading.current_thread())
        go_on.wait(60)
        compile_library(*arguments)

    monkeypatch.setattr(native, "_compile", counted)
    native.compile_ahead("twice")  # returns before it is done
    results = []
    needed = threading.Thread(target=lambda: results.append(native.load("twice").twice(3)))
    needed.start()
    go_on.set()
    needed.join(60)
    assert results == [6] and len(compiled) == 1
    native.compile_ahead("twice")
    assert len(compiled) == 1 and native.is_built("twice")


def test_a_library_that_cannot_be_compiled_ahead_is_said_by_whoever_needs_it(home, monkeypatch):
    source(home, "int twice(int x) { return y; }", monkeypatch)
    before = set(threading.enumerate())
    native.compile_ahead("twice")
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    with pytest.raises(native.CompileError, match=r"`twice.c` cannot be compiled"):
        native.load("twice")


def test_another_source_is_another_library(home, monkeypatch):
    source(home, TWICE, monkeypatch)
    native.load("twice")
    native.load.cache_clear()
    source(home, TWICE.replace("sum += x", "sum += x + 1"), monkeypatch)
    assert native.load("twice").twice(21) == 44


def test_what_the_compiler_says_is_said(home, monkeypatch):
    source(home, "int twice(int x) { return y; }", monkeypatch)
    with pytest.raises(native.CompileError, match=r"`twice.c` cannot be compiled: .*"):
        native.load("twice")
    assert not list((home / ".cache/shoestring/native").iterdir())


def test_a_library_that_cannot_be_written_is_an_error_that_callers_expect(home, monkeypatch):
    source(home, TWICE, monkeypatch)
    native.load("twice")
    native.load.cache_clear()
    (built,) = (home / ".cache/shoestring/native").iterdir()
    built.unlink()
    (built / "in the way").mkdir(parents=True)
    with pytest.raises(native.CompileError, match=r"`twice.c` cannot be compiled: .*[Dd]irectory"):
        native.load("twice")


def test_a_folder_that_others_may_write_to_is_not_loaded_from(home, monkeypatch):
    folder = home / ".cache/shoestring/native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    source(home, TWICE, monkeypatch)
    library = native.load("twice")
    assert library.twice(1) == 2
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_two_processes_may_compile_at_once(home):
    code = "from shoestring import native; native.load('packed24').packed24"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert len(list((home / ".cache/shoestring/native").iterdir())) == 1


def test_threads_are_those_of_torchs_own_pool():
    pools = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    library = native.load("packed24")
    assert isinstance(library, ctypes.CDLL)
    after = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert after == pools or not pools


def test_build_says_what_cannot_be_compiled(home, monkeypatch):
    monkeypatch.setenv("PATH", str(home))  # without a compiler
    count, lines, said = len(native.names()), build(), []
    with pytest.raises(DataError, match=f"{count} of {count} kernels"):
        while True:
            said.append(next(lines))
    assert len(said) == count + 1 and all("compiler" in line for line in said[:-1])


@pytest.mark.slow
def test_build_compiles_every_kernel_once(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "shoestring", "build"]
    said = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=500).stdout
        for _ in range(2)
    ]
    count = len(native.names())
    assert [said[0].count("built in"), said[1].count("built before")] == [count, count]
    assert len(list((tmp_path / ".cache/shoestring/native").glob("*.so"))) >= count


@pytest.mark.slow
def test_every_kernel_compiles_for_an_old_processor(tmp_path):
    """Of the kind that is in hosts of old GPUs: x86 without AVX."""
    language = native._language(".c")
    flags = [flag for flag in language.flags if flag != "-march=native"]
    for source in sorted(native.source_of("race").parent.glob("*.c")):
        command = [native.compiler_of("race"), *flags, "-c", str(source), "-o", str(tmp_path / "object.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode, done.stderr
