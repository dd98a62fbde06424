"""Hostile cases: generated folders, requests and records of strangers, each opened in a process of its own.

A *kind* is a function `generate(draw, folder) -> act` in a module of this folder, listed in `kinds.KINDS`. It writes
what a stranger made into `folder`, which is also the working folder, and returns what the user does with it: a function
without arguments, which returns an exit code. `command("generate", "model")` is such a function. `draw` is a
`random.Random` seeded by the kind and the case's number, so a case is the same wherever it is generated. `hostile` has
values, files and links to draw from.

    def generate(draw: Random, folder: Path) -> Act:
        hostile.tamper_json(draw, write_plan(folder / "plan.json"))
        return command("generate", "model", "--skip", "plan.json")

`run_cases` runs cases and returns a line for each fault. A case may end in success or in one line of error. It has a
fault if

- it runs for more than `SECONDS`, needs more than `BYTES` of memory, or ends by a signal;
- its output has a traceback, a control character, or no line `error: …` where the exit code is not 0 or 1;
- a file outside `folder` is made, changed or removed, or the content of a file outside is in its output or a file.

Outside, beside `folder`, lie `home/` (the user's, with `SECRET` in `home/.ssh/id`) and `tmp/` for temporary files.
`run_traced_cases` runs them under strace, which also sees files that are only opened.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from shoestring.forking import ForkServer
from tests.hostile.kinds import KINDS

Act = Callable[[], object]
Generator = Callable[[random.Random, Path], Act]

SECONDS = 10.0
"""How long a case may run, not counting the time it waits for a processor."""
BYTES = 2 << 30
"""How much memory a case may ask for."""
SECRET = "PRIVATE-KEY-OF-THE-VICTIM"
"""The content of the files outside that no case may read."""
_GENERATED = Path("/hostile-case-is-generated")
"""A path that a case's process asks for, in vain, before it does what the user does."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PRELOADED = (
    "shoestring.cli",
    "shoestring.commands.checkpoint",
    "shoestring.commands.models",
    "shoestring.commands.recordings",
    "shoestring.commands.runs",
    "shoestring.verbs.generate",
    "shoestring.verbs.interchange",
    "shoestring.verbs.prune",
    "shoestring.verbs.quantize",
    "shoestring.verbs.skip",
    "shoestring.report",
    "shoestring.training.loop",
    "shoestring.data.together",
    "gguf",
    "pyarrow.parquet",
    "torch.distributed.checkpoint",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "tests.hostile.frame",
)


def command(*arguments: str | Path) -> Act:
    """What `shoestring` does with these arguments."""

    def act() -> object:
        from shoestring.cli import main

        return main([str(argument) for argument in arguments])

    return act


# -- running ----------------------------------------------------------------------------------------------------------


def run_cases(kind: str, seeds: Iterable[int], place: Path) -> list[str]:
    """Run cases one after the other, each in a folder below `place`; a line for each that has a fault."""
    return [fault for seed in seeds if (fault := _fault(kind, seed, place / f"{kind}-{seed}"))]


def run_traced_cases(cases: Iterable[tuple[str, int]], place: Path) -> list[str]:
    """As `run_cases` under strace: a case may also open no file outside but those of the system and of Python."""
    place.mkdir(parents=True, exist_ok=True)
    log = place / "strace"
    calls = "trace=%file,clone,clone3,fork,vfork"
    arguments = ["strace", "-ff", "-s", "4096", "-e", calls, "-e", "signal=none", "-o", str(log), "-p"]
    tracer = subprocess.Popen([*arguments, str(_server().pid)], stderr=subprocess.PIPE, text=True)
    faults: list[str] = []
    try:
        assert tracer.stderr is not None and "attached" in tracer.stderr.readline()
        for kind, seed in cases:
            folder = place / f"{kind}-{seed}"
            if fault := _fault(kind, seed, folder, SECONDS * 6):  # strace stops it at each of these calls
                faults.append(fault)
            pid = int((folder / "pid").read_text())
            outside = sorted({path for path in _opened(log, pid) if not _is_allowed(path, folder)})
            faults += [f"{kind} {seed}: opens {path}" for path in outside[:3]]
    finally:
        tracer.send_signal(signal.SIGINT)  # which lets go of the server
        tracer.wait()
        assert tracer.stderr is not None
        tracer.stderr.close()
    return faults


def _fault(kind: str, seed: int, place: Path, seconds: float = SECONDS) -> str:
    """What is wrong with a case, in a line; empty where nothing is."""
    for name in ("case", "home/.ssh", "tmp"):
        (place / name).mkdir(parents=True)
    (place / "home/.ssh/id").write_text(SECRET)
    (place / "output").touch()
    before = _listing(place)
    environment = {**os.environ, "HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(place / "tmp/huggingface"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with (place / "output").open("wb") as output:
        pid = _server().fork(run_case, [kind, seed, str(place), seconds], output.fileno(), environment=environment)
    (place / "pid").write_text(str(pid))
    code = _wait(pid, seconds)
    said = (place / "output").read_text("utf-8", "replace")
    problem = _problem(code, said) or _leak(place / "case", said)
    changed = {path for path, _ in set(before.items()) ^ set(_listing(place).items())} - {"pid", "output"}
    if not problem and changed:
        problem = f"changes {min(changed)}"
    return f"{kind} {seed}: {problem}" if problem else ""


def run_case(kind: str, seed: int, place: str, seconds: float) -> None:
    """A case's own process: generate it, and do what the user does."""
    os.setsid()
    folder = Path(place, "case")
    os.chdir(folder)
    tempfile.tempdir = None  # chosen already, by what the server has imported
    held = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (held + BYTES, held + BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))
    # Says where it waits, if it does. While a thread runs, this can end in SIGSEGV.
    faulthandler.dump_traceback_later(seconds * 0.9)
    code: object = 1
    try:
        act = generator(kind)(random.Random(f"{kind} {seed}"), folder)
        _GENERATED.exists()  # which strace sees
        code = act()
    except SystemExit as end:  # tyro's, of arguments that it refuses
        code = end.code
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def generator(kind: str) -> Generator:
    """What writes the cases of a kind."""
    return import_module(KINDS[kind]).generate


@cache
def _server() -> ForkServer:
    return ForkServer(_PRELOADED, more={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})


def _wait(pid: int, seconds: float) -> int | None:
    """The exit code of a case; None where it was ended because it ran for too long."""
    end, queued = time.monotonic() + seconds, 0.0
    while time.monotonic() - queued < end:
        with suppress(TimeoutError):
            return _server().wait(pid, 0.2)
        with suppress(OSError):  # time in which it could run, and others did
            queued = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    for group in (os.killpg, os.kill):
        with suppress(OSError):
            group(pid, signal.SIGKILL)
    _server().wait(pid)
    return None


# -- faults -----------------------------------------------------------------------------------------------------------


def _problem(code: int | None, said: str) -> str:
    if code is None:
        return "runs for too long"
    if "Traceback (most recent call last)" in said:
        return f"traceback: {said.strip().splitlines()[-1][:300]}"
    if code < 0:
        return f"ends by {signal.Signals(-code).name}"
    if code not in (0, 1) and "error: " not in said:
        return f"ends with {code} and no line of error: {said[-200:]!r}"
    if control := _CONTROL.search(said):
        return f"prints the control character {control[0]!r}"
    return ""


def _leak(folder: Path, said: str) -> str:
    if SECRET in said:
        return "prints a secret"
    for path in _files(folder):
        with suppress(OSError):
            if (
                stat.S_ISREG(path.lstat().st_mode)
                and path.stat().st_size < 1 << 26
                and SECRET.encode() in path.read_bytes()
            ):
                return f"copies a secret to {path.relative_to(folder)}"
    return ""


def _listing(place: Path) -> dict[str, tuple[int, int, int]]:
    """What lies beside a case's folder, but for temporary files and caches, each with what shows a change."""
    found = {}
    for path in _files(place):
        name = path.relative_to(place).as_posix()
        if not name.startswith(("case/", "tmp/", "home/.cache")):
            status = path.lstat()
            found[name] = (status.st_mode, status.st_size, status.st_mtime_ns if path.is_file() else 0)
    return found


def _files(folder: Path) -> Iterator[Path]:
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(above, name)


# -- what strace saw --------------------------------------------------------------------------------------------------

_FORK = re.compile(r"^(?:clone3?|v?fork)\(.*= (\d+)$")
_OPEN = re.compile(r'^(?:open|openat|openat2|creat)\((?:[^,"]+, )?"((?:[^"\\]|\\.)*)"(?:, ([A-Z_|]+))?.*\) = \d+')
_PATHS = re.compile(r'"((?:[^"\\]|\\.)*)"')
_CHANGE = re.compile(
    r"^(?:unlink|unlinkat|rename|renameat2?|link|linkat|symlink|symlinkat|mkdir|mkdirat|rmdir|truncate)\("
)


def _opened(log: Path, pid: int) -> Iterator[Path]:
    """Files that a process and those below it opened or changed."""
    try:
        lines = Path(f"{log}.{pid}").read_text(errors="replace").splitlines()
    except OSError:
        return
    marks = [number for number, line in enumerate(lines) if str(_GENERATED) in line]
    for line in lines[marks[0] if marks else 0 :]:  # what the generator opened before is its own affair
        if forked := _FORK.match(line):
            yield from _opened(log, int(forked[1]))
        elif opened := _OPEN.match(line):
            yield Path(_unescaped(opened[1]))
        elif _CHANGE.match(line) and line.endswith("= 0"):
            yield from (Path(_unescaped(path)) for path in _PATHS.findall(line))


def _unescaped(text: str) -> str:
    return (
        text.encode("latin-1", "replace").decode("unicode_escape").encode("latin-1", "replace").decode(errors="replace")
    )


@cache
def _roots() -> tuple[str, ...]:
    """Where the system, Python and this repository lie; `/dev` and `/proc` only as far as every program reads them."""
    python = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    code = Path(__file__).parents[2]
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/sys", "/proc")
    folders = (*python, *filter(None, sys.path), code / "src", code / "tests", code / ".venv", *system)
    return (*(os.path.realpath(path) + "/" for path in folders), "/dev/shm/shoestring-", "/dev/shm/sem.")


def _is_allowed(path: Path, place: Path) -> bool:
    if not path.is_absolute():
        path = place / "case" / path  # what goes up from there is seen by what it leads to
    if str(path) in ("/dev/null", "/dev/urandom", "/dev/tty", "/", "/dev/shm"):
        return True
    real = os.path.realpath(path) + "/"
    own = [os.path.realpath(place / name) + "/" for name in ("case", "tmp", "home/.cache", "home/.local/state")]
    # Folders above are opened one in another where the user's own word is kept (`guarded.private_folder`).
    return real.startswith((*own, *_roots())) or f"{os.path.realpath(place)}/home/".startswith(real)
