"""`shoestring memory`: shows recordings of the memory use of a run, and the leases of this host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.memory import Broker, allocation_plan, load
from shoestring.memory.broker.table import table
from shoestring.memory.broker.tenant import Terms
from shoestring.memory.tracing import page
from shoestring.memory.tracing.comparison import compare
from shoestring.memory.tracing.memory_viz import snapshot
from shoestring.memory.tracing.recording import MemoryProfile
from shoestring.memory.tracing.summary import summary
from shoestring.storage.foreign import one_line
from shoestring.storage.whole import write_atomic

FILE = "memory.npz"


def view(file: Path, out: Path | None = None, tensors: int = 15) -> list[str]:
    """Write a memory recording as one HTML page.

    Args:
        file: the recording, or the folder of a run that has one.
        out: path of the page; defaults to the path of the recording, with `.html` in place of `.npz`.
        tensors: number of tensors to name, the largest first.

    Returns:
        Lines with the peak memory and the size of a static allocation plan; the last line names the page.
    """
    path = recording_of(file)
    profile = _load(path)
    lines = [*summary(profile, tensors), *allocation_plan.described(profile)]
    return [*lines, "", f"page: {page.write(profile, out or path.with_suffix('.html'))}"]


def diff(before: Path, after: Path, tensors: int = 15) -> list[str]:
    """Compare two recordings; returns lines with the tensors that changed the peak, the largest changes first."""
    return list(compare(_load(recording_of(before)), _load(recording_of(after))).lines(tensors))


def export(file: Path, out: Path | None = None) -> Path:
    """Convert a recording to a file for torch's memory_viz page, and return the file's path; by default the file lies
    beside the recording."""
    path = recording_of(file)
    out = out or path.with_suffix(".pickle")
    write_atomic(out, snapshot(_load(path)))
    return out


def list_leases(folder: Path = Path(Broker.folder), *, shared: bool = False) -> list[str]:
    """List the processes that share this host's memory through [memory.broker], and the memory that they hold.

    Args:
        folder: value of `memory.broker.folder` in these processes.
        shared: whether to list the processes that share memory with other users, instead of only this user's processes.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder `{folder}`", hint="name the folder in `memory.broker.folder`")
    settings = Broker(folder=str(folder), all_users=shared)
    return list(table(Terms(settings.place, shared=shared, reserve=settings.reserve)))


def compare_runs(folders: Sequence[Path]) -> list[str]:
    """Compare the peak memory of each run with that of the first run; returns no lines if a run has no recording."""
    paths = [recording_of(folder) for folder in folders]
    if len(paths) < 2 or not all(path.is_file() for path in paths):
        return []
    first, *others = (_load(path) for path in paths)
    text: list[str] = []
    for folder, other in zip(folders[1:], others, strict=True):
        text += ["", f"Memory of {folder} against {folders[0]}", *map(one_line, compare(first, other).lines(8))]
    return text


def recording_of(path: Path) -> Path:
    """The path of a recording: `path` itself if it is a file, or the recording in the run folder `path`."""
    return path / FILE if path.is_dir() else path


def _load(path: Path) -> MemoryProfile:
    if path.suffix != ".npz":
        raise ConfigError(f"{path} is not a memory recording", hint="name the .npz file, or the folder of a run")
    return load(path)
