"""`shoestring profile`: where the time of a program goes; importing this module imports no torch."""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg, subcommand

from shoestring.core.errors import ConfigError, ShoestringError

if TYPE_CHECKING:
    from shoestring.profile.recording import Profile

_STARTING = __file__, runpy.__file__, "<frozen runpy>"


@dataclass(frozen=True)
class RunProfiled:
    """Run a Python program and show which of its lines take the time."""

    program: Positional[str] = ""
    """Python file to run. All that follows it are the program's own arguments."""
    module: Annotated[str, arg(aliases=("-m",))] = ""
    """Name of a Python module to run in place of a file, as `python -m` does."""
    out: Path | None = None
    """File to save the profile to; defaults to profile.npz, and under torchrun to profile-RANK.npz for each rank."""
    lines: int = 15
    """Number of lines of the program to show."""
    share: float = 1.0
    """Part of the time in which operators are recorded, above 0 and up to 1. Below 1, counts and times are estimates,
    scaled up; a smaller share costs less time and is less certain."""
    budget: float | None = None
    """Processor time that the profile may add, as a part of the program's: 0.03 is 3%. The share of the time that is
    recorded follows from it."""
    native_frames: bool = False
    """Sample the native functions that operators spend their time in, such as those of MKL. Linux only."""
    inside: str = ""
    """Names of installed packages whose lines count as the program's own, such as `transformers`, with commas between
    them."""

    def run(self, arguments: Sequence[str]) -> int:
        from shoestring.profile import profiled
        from shoestring.profile.summary import summary

        _check_lines(self.lines)
        file = Path(self.program).resolve()
        if file.suffix == ".npz":
            raise ConfigError(f"{self.program} is no program", hint=f"shoestring profile view {self.program}")
        if not (self.module or self.program):
            raise ConfigError("no program is named", hint="name a Python file, or a module with -m")
        if not self.module and not file.is_file():
            raise ConfigError(f"there is no program {self.program}", hint="name a Python file")
        out, process = self.out or Path(_name()), os.getpid()
        if out.is_dir():
            raise ConfigError(f"cannot save the profile to {out}, which is a folder", hint="name a file with --out")
        for name, value in (("share", self.share), ("budget", self.budget)):
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"--{name} must be above 0 and at most 1, got {value:g}")
        inside = [name.strip() for name in self.inside.split(",") if name.strip()]
        code: object = 0
        failed: BaseException | None = None
        folder = "" if self.module else str(file.parent)
        recording = profiled(out, inside, share=self.share, budget=self.budget, native_frames=self.native_frames)
        with _interpreter([self.program or self.module, *arguments], folder):
            if self.module and not _is_there(self.module):
                raise ConfigError(f"there is no module {self.module}", hint="name it as `python -m` does")
            with _saved_on_sigterm(), recording as result:
                try:
                    if self.module:
                        runpy.run_module(self.module, run_name="__main__", alter_sys=True)
                    else:
                        runpy.run_path(str(file), run_name="__main__")
                except SystemExit as ended:
                    code = ended.code
                except KeyboardInterrupt:
                    code = 128 + signal.SIGINT
                except BaseException as error:
                    failed = error
        if failed is not None:
            return _fail(failed, out if os.getpid() == process else None)
        if os.getpid() == process:  # and no fork of it, whose program ends here too
            print("\n".join(summary(result.profile, self.lines)))
            print(f"\nsaved to {out}; as a page: shoestring profile view {out}")
        if code is None or isinstance(code, int):
            return code or 0
        print(code, file=sys.stderr)
        return 1


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _fail(error: BaseException, out: Path | None) -> int:
    """Show an error of the program as Python does, without the frames that started it, and where its profile is."""
    if not isinstance(error, ShoestringError):
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in _STARTING:
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
    if out is not None:
        print(f"the program failed; its profile until then: shoestring profile view {out}", file=sys.stderr)
    if isinstance(error, ShoestringError):
        raise error
    return 1


def _name() -> str:
    return f"profile-{os.environ['RANK']}.npz" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "profile.npz"


@contextmanager
def _saved_on_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends the program as `sys.exit` does, unless the program handles it, so that nothing is lost."""
    ours, process = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != process:  # a fork, which ends as it would without us
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
    """Arguments and import path as Python gives them to a program."""
    before = list(sys.argv), list(sys.path)
    sys.argv[:], sys.path[0] = argv, folder
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = before


@dataclass(frozen=True)
class ViewProfile:
    """Write a profile as one HTML page that works offline, and show its lines here."""

    files: Positional[tuple[Path, ...]]
    """Files with the profiles to show; several, such as those of the ranks, are merged, and the page has the times of
    each."""
    out: Path | None = None
    """Path of the page to write; defaults to that of the first profile with `.html` in place of `.npz`."""
    lines: int = 15
    """Number of lines of the program to show here."""

    def run(self, arguments: Sequence[str]) -> int:
        from shoestring.profile.summary import summary
        from shoestring.profile.view import page

        _check_lines(self.lines)
        profile = _loaded(self.files)
        print("\n".join(summary(profile, self.lines)))
        print(f"\npage: {page.write(profile, self.out or self.files[0].with_suffix('.html'))}")
        return 0


@dataclass(frozen=True)
class DiffProfiles:
    """Compare two profiles: which lines became slower or faster; also where lines have moved in between."""

    before: Positional[Path]
    """File with the earlier profile."""
    after: Positional[Path]
    """File with the later profile."""
    out: Path = Path("profile-diff.html")
    """Path of the page to write, whose flame graph is red where time was added and blue where it was removed."""
    lines: int = 15
    """Number of lines of the program to show here."""

    def run(self, arguments: Sequence[str]) -> int:
        from shoestring.profile.comparison import compare
        from shoestring.profile.summary import changes
        from shoestring.profile.view import page

        _check_lines(self.lines)
        comparison = compare(_loaded([self.before]), _loaded([self.after]))
        print("\n".join(changes(comparison, self.lines)))
        print(f"\npage: {page.write_comparison(comparison, (self.before.stem, self.after.stem), self.out)}")
        return 0


@dataclass(frozen=True)
class MergeProfiles:
    """Merge profiles, such as those of several ranks, into one file that keeps the times of each."""

    files: Positional[tuple[Path, ...]]
    """Files with the profiles to merge."""
    out: Path = Path("profile-merged.npz")
    """File to save the merged profile to."""

    def run(self, arguments: Sequence[str]) -> int:
        _loaded(self.files, always=True).save(self.out)
        print(self.out)
        return 0


@dataclass(frozen=True)
class ExportProfile:
    """Convert a profile for another tool."""

    file: Positional[Path]
    """File with the profile to convert."""
    format: Annotated[str, arg(metavar="{speedscope,pprof,collapsed,hatchet,perfetto}")]
    """Format to write: speedscope's JSON; pprof's protobuf, with time, calls, bytes and FLOP; collapsed stacks, for
    FlameGraph; a literal for Hatchet; or a trace for Perfetto of the aggregated call paths."""
    out: Path | None = None
    """File to write; defaults to that of the profile with the format's own ending."""

    def run(self, arguments: Sequence[str]) -> int:
        from shoestring.profile.exports import FORMATS
        from shoestring.storage.whole import write_atomic

        if self.format not in FORMATS:
            raise ConfigError(f"there is no format `{self.format}`", hint=f"formats: {', '.join(FORMATS)}")
        ending, export = FORMATS[self.format]
        out = self.out or self.file.with_suffix(ending)
        write_atomic(out, export(_loaded([self.file])))
        print(out)
        return 0


@dataclass(frozen=True)
class ProfileProgram:
    """Profile any Python program by its own lines: `shoestring profile script.py [its arguments]`."""

    action: (
        Annotated[RunProfiled, subcommand("run", prefix_name=False)]
        | Annotated[ViewProfile, subcommand("view", prefix_name=False)]
        | Annotated[DiffProfiles, subcommand("diff", prefix_name=False)]
        | Annotated[MergeProfiles, subcommand("merge", prefix_name=False)]
        | Annotated[ExportProfile, subcommand("export", prefix_name=False)]
    )
    """Action on a program or on profiles; `run` may be left out."""

    def __call__(self, arguments: Sequence[str]) -> int:
        return self.action.run(arguments)


_FLAGS = ("--debug", "--help", "-h", "--native-frames", "--no-native-frames")
ACTIONS = ("run", "view", "diff", "merge", "export")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows `shoestring profile`, as the command line's own arguments and those of the program that it runs."""
    own, rest = [], list(arguments)
    if rest[:1] == ["run"]:
        rest.pop(0)
    elif not rest or rest[0] in (*ACTIONS, "--help", "-h"):
        return rest, []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        own.append(rest.pop(0))
        if rest and "=" not in own[-1] and own[-1] not in _FLAGS:
            own.append(rest.pop(0))
        if own[-2:-1] in (["-m"], ["--module"]) or own[-1].startswith("--module="):
            return ["run", *own], rest
    rest = rest[1:] if rest[:1] == ["--"] else rest
    return ["run", *own, *rest[:1]], rest[1:]


def _loaded(files: Sequence[Path], *, always: bool = False) -> Profile:
    """The profile in a file, or those of several merged, named by what tells their files apart."""
    from shoestring.profile import load
    from shoestring.profile.comparison import merged

    if not files:
        raise ConfigError("no profile is named", hint="name one or several .npz files")
    profiles = [load(file) for file in files]
    return profiles[0] if len(profiles) == 1 and not always else merged(profiles, [file.stem for file in files])


def _check_lines(lines: int) -> None:
    if lines < 1:
        raise ConfigError(f"--lines must be positive, got {lines}")
