"""`shoestring profile`: profiles a program, and shows, compares and converts profiles."""

from __future__ import annotations

import gc
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# Modules that only other verbs need are imported inside their functions: the profiled program runs in this process, so
# the process should load as little else as possible.
from shoestring.core.errors import ConfigError
from shoestring.profile import load, profiled
from shoestring.verbs.settings import ProgramProfiling

if TYPE_CHECKING:
    from shoestring.profile.comparison import Comparison
    from shoestring.profile.recording import Profile

_STARTING = __file__, runpy.__file__, "<frozen runpy>"


@dataclass
class ProfiledProgram:
    """The outcome of a profiled program."""

    out: Path
    """File that holds the profile."""
    profile: Profile | None = None
    """The profile; None in a process that the program forked, because `profile_program` returns there as well."""
    code: object = 0
    """Exit status, in a form that `sys.exit` accepts."""
    error: BaseException | None = None
    """Exception that the program raised; None if it raised none."""

    def print_error(self) -> None:
        """Print the error to stderr as Python does, without the frames that started the program."""
        if self.error is not None:
            frames = self.error.__traceback__
            while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in _STARTING:
                frames = frames.tb_next
            traceback.print_exception(self.error.with_traceback(frames))


def profile_program(
    program: str, arguments: Sequence[str] = (), settings: ProgramProfiling | None = None, *, module: bool = False
) -> ProfiledProgram:
    """Run a Python program in this process and save its profile.

    Args:
        program: the file of the program; or the name of a module, if `module` is True.

    Raises:
        ConfigError: the program does not exist, or a setting is out of range.
    """
    settings = settings or ProgramProfiling()
    file = Path(program).resolve()
    result, process = ProfiledProgram(settings.out or Path(_name())), os.getpid()
    _check_arguments(program, file, settings, result.out, module=module)
    inside = [name.strip() for name in settings.inside.split(",") if name.strip()]
    recording = profiled(
        result.out, inside, share=settings.share, budget=settings.budget, native_frames=settings.native_frames
    )
    with _interpreter([program, *arguments], "" if module else str(file.parent)):
        if module:
            try:
                spec = importlib.util.find_spec(program)
            except (ImportError, ValueError):
                spec = None
            if spec is None:
                raise ConfigError(f"there is no module {program}", hint="name it as `python -m` does")
        with _saved_on_sigterm(), recording as recorded:
            try:
                if module:
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(str(file), run_name="__main__")
            except SystemExit as ended:
                result.code = ended.code
            except KeyboardInterrupt:
                result.code = 128 + signal.SIGINT
            except BaseException as error:
                result.code, result.error = 1, error
    if os.getpid() == process:  # processes that the program forked get here as well
        result.profile = recorded.profile
    else:
        # Many forked processes are short. Without `gc.freeze`, collecting the garbage of all imported modules at their
        # exit would take longer than their own work.
        gc.freeze()
    return result


def _check_arguments(program: str, file: Path, settings: ProgramProfiling, out: Path, *, module: bool) -> None:
    """Raise ConfigError if the program does not exist, or if the profile cannot be recorded or saved."""
    if not module and file.suffix == ".npz":
        raise ConfigError(f"{program} is no program", hint=f"shoestring profile view {program}")
    if not program:
        raise ConfigError("no program is named", hint="name a Python file, or a module with -m")
    if not module and not file.is_file():
        raise ConfigError(f"there is no program {program}", hint="name a Python file")
    if out.is_dir():
        raise ConfigError(f"cannot save the profile to {out}, which is a folder", hint="name a file with --out")
    for name, value in (("share", settings.share), ("budget", settings.budget)):
        if value is not None and not 0 < value <= 1:
            raise ConfigError(f"--{name} must be above 0 and at most 1, got {value:g}")


def _name() -> str:
    return f"profile-{os.environ['RANK']}.npz" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "profile.npz"


@contextmanager
def _saved_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM ends the program like `sys.exit`, so that its profile is saved.

    If the program sets a handler of its own, that handler is used instead.
    """
    ours, process = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != process:  # in a forked process, SIGTERM keeps its usual effect
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        sys.exit(128 + number)

    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _interpreter(argv: Sequence[str], folder: str) -> Iterator[None]:
    """Context with the `sys.argv` and `sys.path` that Python would give the program."""
    before = list(sys.argv), list(sys.path)
    sys.argv[:], sys.path[:] = argv, [folder, *sys.path]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = before


def open_profile(*files: Path) -> Profile:
    """Read a profile, or read several and merge them; each part of a merged profile has the name of its file.

    Raises:
        ConfigError: no file is named.
        DataError: a file holds no profile.
    """
    from shoestring.profile.comparison import merged

    profiles = _load(files)
    return profiles[0] if len(profiles) == 1 else merged(profiles, [file.stem for file in files])


def view(files: Sequence[Path], out: Path | None = None) -> tuple[Profile, Path]:
    """Merge profiles and write them as one HTML page; return the profile and the page.

    Args:
        out: path of the page; defaults to the path of the first file, with `.html` in place of `.npz`.
    """
    from shoestring.profile.view import page

    profile = open_profile(*files)
    return profile, page.write(profile, out or files[0].with_suffix(".html"))


def diff(before: Path, after: Path, out: Path = Path("profile-diff.html")) -> tuple[Comparison, Path]:
    """Compare two profiles and write a page; return the comparison and the path of the page."""
    from shoestring.profile.comparison import compare
    from shoestring.profile.view import page

    comparison = compare(open_profile(before), open_profile(after))
    return comparison, page.write_comparison(comparison, (before.stem, after.stem), out)


def merge(files: Sequence[Path], out: Path = Path("profile-merged.npz")) -> Path:
    """Merge profiles into one file that still has the times of each profile, and return the path of the file."""
    from shoestring.profile.comparison import merged

    merged(_load(files), [file.stem for file in files]).save(out)
    return out


def export(file: Path, format: str, out: Path | None = None) -> Path:
    """Convert a profile to the format of another tool, and return the path of the new file.

    Args:
        format: one of `profile.exports.FORMATS`.
        out: the file to write; defaults to `file` with the extension of the format.

    Raises:
        ConfigError: the format does not exist.
    """
    from shoestring.profile.exports import FORMATS
    from shoestring.storage.whole import write_atomic

    if format not in FORMATS:
        raise ConfigError(f"there is no format `{format}`", hint=f"formats: {', '.join(FORMATS)}")
    ending, write = FORMATS[format]
    out = out or file.with_suffix(ending)
    write_atomic(out, write(open_profile(file)))
    return out


def _load(files: Sequence[Path]) -> list[Profile]:
    if not files:
        raise ConfigError("no profile is named", hint="name one or several .npz files")
    return [load(file) for file in files]
