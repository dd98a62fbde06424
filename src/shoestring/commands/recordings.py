"""Arguments of `shoestring profile` and `shoestring memory`, which record where a run spends time and memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shoestring.commands.printing import say_lines
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.memory import Broker
from shoestring.verbs.settings import ProgramProfiling


@dataclass(frozen=True)
class ShownLines:
    """Settings for the printed summary of a profile."""

    lines: int = 15
    """Number of lines of the program to show."""

    def check(self) -> int:
        """Return the number of lines, or raise ConfigError if the number is not positive."""
        if self.lines < 1:
            raise ConfigError(f"--lines must be positive, got {self.lines}")
        return self.lines


@dataclass(frozen=True, kw_only=True)
class PrintsSummary:
    """Arguments of a verb that prints a summary of a profile."""

    shown: ShownLines = ShownLines()
    """Settings for the printed summary."""


@dataclass(frozen=True)
class RunProfiled(PrintsSummary):
    """Arguments of `shoestring profile` when it runs a program."""

    program: Positional[str] = ""
    """Python file to run. All arguments after the file are passed to the program."""
    module: Annotated[str, arg(aliases=("-m",))] = ""
    """Name of a Python module to run instead of a file, as with `python -m`."""
    settings: ProgramProfiling = field(default_factory=ProgramProfiling)
    """Settings of the profiling."""

    def __call__(self, arguments: Sequence[str]) -> int:
        from shoestring.profile.summary import summary
        from shoestring.verbs.profile import profile_program

        lines = self.shown.check()
        ended = profile_program(self.program or self.module, arguments, self.settings, module=bool(self.module))
        if ended.error is not None:
            if not isinstance(ended.error, ShoestringError):
                ended.print_error()
            if ended.profile is not None:
                note = f"the program failed; its profile until then: shoestring profile view {ended.out}"
                print(note, file=sys.stderr)
            if isinstance(ended.error, ShoestringError):
                raise ended.error
        elif ended.profile is not None:
            say_lines([*summary(ended.profile, lines), ""])
            print(f"saved to {ended.out}; as a page: shoestring profile view {ended.out}")
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1


@dataclass(frozen=True)
class ViewProfile(PrintsSummary):
    """Arguments of `shoestring profile view`."""

    files: Positional[tuple[Path, ...]]
    """Files with the profiles to show. Several profiles, such as those of all ranks, are merged, and the page has the
    times of each profile."""
    out: Path | None = None
    """Path of the page to write; defaults to the path of the first profile, with `.html` in place of `.npz`."""

    def __call__(self) -> int:
        from shoestring.profile.summary import summary
        from shoestring.verbs.profile import view

        lines = self.shown.check()
        profile, page = view(self.files, self.out)
        say_lines([*summary(profile, lines), ""])
        print(f"page: {page}")
        return 0


@dataclass(frozen=True)
class DiffProfiles(PrintsSummary):
    """Arguments of `shoestring profile diff`."""

    before: Positional[Path]
    """File with the earlier profile."""
    after: Positional[Path]
    """File with the later profile."""
    out: Path = Path("profile-diff.html")
    """Path of the page to write; its flame graph is red where time was added, and blue where time was removed."""

    def __call__(self) -> int:
        from shoestring.profile.summary import changes
        from shoestring.verbs.profile import diff

        lines = self.shown.check()
        comparison, page = diff(self.before, self.after, self.out)
        say_lines([*changes(comparison, lines), ""])
        print(f"page: {page}")
        return 0


@dataclass(frozen=True)
class MergeProfiles:
    """Arguments of `shoestring profile merge`."""

    files: Positional[tuple[Path, ...]]
    """Files with the profiles to merge."""
    out: Path = Path("profile-merged.npz")
    """File to save the merged profile to."""

    def __call__(self) -> int:
        from shoestring.verbs.profile import merge

        print(merge(self.files, self.out))
        return 0


@dataclass(frozen=True)
class ExportProfile:
    """Arguments of `shoestring profile export`."""

    file: Positional[Path]
    """File with the profile to convert."""
    format: Annotated[str, arg(metavar="{speedscope,pprof,collapsed,hatchet,perfetto}")]
    """Format to write: JSON for speedscope; protobuf for pprof, with time, calls, bytes and FLOP; collapsed stacks for
    FlameGraph; a literal for Hatchet; or a trace of the aggregated call paths for Perfetto."""
    out: Path | None = None
    """File to write; defaults to the path of the profile, with the extension of the format."""

    def __call__(self) -> int:
        from shoestring.verbs.profile import export

        print(export(self.file, self.format, self.out))
        return 0


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownTensors:
    """Settings for the printed summary of a memory recording."""

    tensors: int = 15
    """Number of tensors to print, the largest first."""


@dataclass(frozen=True)
class MemoryRecording:
    """Arguments that name a recording of memory."""

    file: Positional[Path]
    """File with the recording, or the folder of a run that has one."""


@dataclass(frozen=True, kw_only=True)
class ViewMemory(ShownTensors, MemoryRecording):
    """Arguments of `shoestring memory view`."""

    out: Path | None = None
    """Path of the page to write; defaults to the path of the recording, with `.html` in place of `.npz`."""

    def __call__(self) -> int:
        from shoestring.verbs.memory import view

        say_lines(view(self.file, self.out, self.tensors))
        return 0


@dataclass(frozen=True, kw_only=True)
class DiffMemory(ShownTensors):
    """Arguments of `shoestring memory diff`."""

    before: Positional[Path]
    """File with the earlier recording, or the folder of its run."""
    after: Positional[Path]
    """File with the later recording, or the folder of its run."""

    def __call__(self) -> int:
        from shoestring.verbs.memory import diff

        say_lines(diff(self.before, self.after, self.tensors))
        return 0


@dataclass(frozen=True)
class ExportMemory(MemoryRecording):
    """Arguments of `shoestring memory export`."""

    out: Path | None = None
    """File to write; defaults to the path of the recording, with `.pickle` in place of `.npz`."""

    def __call__(self) -> int:
        from shoestring.verbs.memory import export

        print(export(self.file, self.out))
        return 0


@dataclass(frozen=True)
class LeasedMemory:
    """Arguments of `shoestring memory host`."""

    folder: Path = Path(Broker.folder)
    """Value of `memory.broker.folder` in the processes on this host that share memory."""
    shared: bool = False
    """Show the processes that share memory with other users, instead of only this user's processes."""

    def __call__(self) -> int:
        from shoestring.verbs.memory import list_leases

        for line in list_leases(self.folder, shared=self.shared):
            print(line)
        return 0


# -- splitting the arguments of `shoestring profile` -------------------------------------------------------------------

_FLAGS = ("--debug", "--help", "-h", "--native-frames", "--no-native-frames")
"""Flags of `shoestring profile` that take no value."""


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `shoestring profile run` into the arguments of the verb and the arguments of the program.
    The first part ends with the name of the program."""
    own, rest = [], list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        own.append(rest.pop(0))
        if rest and "=" not in own[-1] and own[-1] not in _FLAGS:
            own.append(rest.pop(0))
        if own[-2:-1] in (["-m"], ["--module"]) or own[-1].startswith("--module="):
            return own, rest
    rest = rest[1:] if rest[:1] == ["--"] else rest
    return [*own, *rest[:1]], rest[1:]
