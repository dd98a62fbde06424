"""`shoestring memory`: what the memory of a run was of; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, subcommand

from shoestring.core.errors import ConfigError

if TYPE_CHECKING:
    from shoestring.memory.tracing.recording import MemoryProfile

FILE = "memory.npz"


@dataclass(frozen=True)
class ViewMemory:
    """Write a recording of memory as one HTML page that works offline, and show here its peak and what a static plan of
    its addresses would take."""

    file: Positional[Path]
    """File with the recording, or the folder of a run that has one."""
    out: Path | None = None
    """Path of the page to write; defaults to that of the recording with `.html` in place of `.npz`."""
    tensors: int = 15
    """Number of tensors to show here, the largest first."""

    def run(self) -> int:
        from shoestring.memory import allocation_plan
        from shoestring.memory.tracing import page
        from shoestring.memory.tracing.summary import summary

        path = recording_of(self.file)
        profile = _loaded(path)
        print("\n".join([*summary(profile, self.tensors), *allocation_plan.described(profile)]))
        print(f"\npage: {page.write(profile, self.out or path.with_suffix('.html'))}")
        return 0


@dataclass(frozen=True)
class DiffMemory:
    """Compare two recordings: what made the peak of the later one higher, tensor by tensor."""

    before: Positional[Path]
    """File with the earlier recording, or the folder of its run."""
    after: Positional[Path]
    """File with the later recording, or the folder of its run."""
    tensors: int = 15
    """Number of changes to show, the largest first."""

    def run(self) -> int:
        from shoestring.memory.tracing.comparison import compare

        comparison = compare(_loaded(recording_of(self.before)), _loaded(recording_of(self.after)))
        print("\n".join(comparison.lines(self.tensors)))
        return 0


@dataclass(frozen=True)
class ExportMemory:
    """Convert a recording of memory for torch's memory_viz page (pytorch.org/memory_viz)."""

    file: Positional[Path]
    """File with the recording, or the folder of a run that has one."""
    out: Path | None = None
    """File to write; defaults to that of the recording with `.pickle` in place of `.npz`."""

    def run(self) -> int:
        from shoestring.memory.tracing.memory_viz import snapshot
        from shoestring.storage.whole import write_atomic

        path = recording_of(self.file)
        out = self.out or path.with_suffix(".pickle")
        write_atomic(out, snapshot(_loaded(path)))
        print(out)
        return 0


@dataclass(frozen=True)
class LeasedMemory:
    """Show which processes hold the memory of this host, among those that have agreed on it with [memory.broker]."""

    folder: Path = Path("/dev/shm")
    """Folder that those processes have as `memory.broker.folder`."""
    shared: bool = False
    """Show the processes that share the host with other users, instead of this user's own."""

    def run(self) -> int:
        from shoestring.memory import Broker
        from shoestring.memory.broker.table import table
        from shoestring.memory.broker.tenant import Terms

        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder `{self.folder}`", hint="name that of `memory.broker.folder`")
        settings = Broker(folder=str(self.folder), shared=self.shared)
        for line in table(Terms(settings.place, shared=self.shared, reserve=settings.reserve)):
            print(line)
        return 0


@dataclass(frozen=True)
class RecordedMemory:
    """Show what the memory of a run was of, as [memory.tracing] or `memory.traced` has recorded it, and who holds the
    memory of this host."""

    action: (
        Annotated[ViewMemory, subcommand("view", prefix_name=False)]
        | Annotated[DiffMemory, subcommand("diff", prefix_name=False)]
        | Annotated[ExportMemory, subcommand("export", prefix_name=False)]
        | Annotated[LeasedMemory, subcommand("host", prefix_name=False)]
    )
    """Action: view, diff and export are of recordings of memory; host is of the memory that processes hold now."""

    def __call__(self, overrides: Sequence[str]) -> int:
        return self.action.run()


def recording_of(path: Path) -> Path:
    """The file itself, or that in the folder of a run."""
    return path / FILE if path.is_dir() else path


def of_runs(folders: Sequence[Path]) -> list[str]:
    """What made the peak of each run another than that of the first, for runs that have recorded it."""
    paths = [recording_of(folder) for folder in folders]
    if len(paths) < 2 or not all(path.is_file() for path in paths):
        return []
    from shoestring.memory.tracing.comparison import compare

    first, *others = (_loaded(path) for path in paths)
    text: list[str] = []
    for folder, other in zip(folders[1:], others, strict=True):
        text += ["", f"Memory of {folder} against {folders[0]}", *compare(first, other).lines(8)]
    return text


def _loaded(path: Path) -> MemoryProfile:
    from shoestring.memory import load

    if path.suffix != ".npz":
        raise ConfigError(f"{path} is no recording of memory", hint="name the .npz file, or the folder of a run")
    return load(path)
