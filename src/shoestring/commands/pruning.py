"""`shoestring checkpoint prune`: delete all but the newest checkpoints of a run, and what a dead one has in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoestring.checkpoint.recovery.resume import forget_all
from shoestring.checkpoint.tiers.claim import LOCK
from shoestring.checkpoint.tiers.disk import ASIDE, Disk
from shoestring.checkpoint.tiers.file_acts import Files, Lock
from shoestring.commands.archive import DISK, Archive, verify
from shoestring.core.errors import CheckpointError, ConfigError


def prune(archive: Archive, keep: int, memory: bool) -> list[Path]:
    """Delete all but the newest checkpoints on disk, once those have proved good; and what a dead run has in memory.
    Those that the run has gone back from are deleted, unless there are no others.

    Raises:
        ConfigError: nothing would be kept.
        CheckpointError: there is nothing, what would be kept is damaged, or the run is not dead.
    """
    if keep < 1:
        raise ConfigError(f"--keep must be at least 1, got {keep}")
    going = users(archive.memory)
    if memory and going:
        listed = ", ".join(map(str, going))
        raise CheckpointError(f"`{archive.memory}` is in use by process {listed}", hint="end the run first")
    every = archive.found() if memory and archive.memory.exists() else archive.some()
    there = [checkpoint for checkpoint in every if checkpoint.level == DISK and not checkpoint.path.is_symlink()]
    good = [checkpoint for checkpoint in there if not checkpoint.state.startswith(("not", "damaged"))]
    kept = ([checkpoint for checkpoint in good if not checkpoint.abandoned] or good)[:keep]
    for checkpoint in kept:
        if wrong := verify(checkpoint):
            raise CheckpointError(
                f"nothing is deleted: the checkpoint of step {checkpoint.step} is damaged: {wrong[0]}",
                hint="delete that one first",
            )
    # Other programs' folders may begin with `step-`, too, and another host may be writing here.
    left = [
        checkpoint
        for checkpoint in there
        if ASIDE.fullmatch(checkpoint.path.name) and not going and not _locked(archive.folder)
    ]
    gone = [checkpoint.path for checkpoint in (*good, *left) if checkpoint not in kept]
    _delete(archive.folder, gone)
    if memory and archive.memory.exists():
        forget_all(archive.memory)
        gone.append(archive.memory)
    return gone


def _locked(folder: Path) -> bool:
    """Whether a run holds the lock of its folder of checkpoints."""
    if not (folder / LOCK).exists():
        return False
    try:
        held = Lock.of(folder / LOCK)
    except OSError:
        return True
    if held is not None:
        held.release()
    return held is None


def _delete(folder: Path, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_file():
            path.unlink(missing_ok=True)
    Disk(folder, Files()).retire(path for path in paths if path.is_dir())


def users(memory: Path) -> list[int]:
    """The processes on this host that have a run's slots mapped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # ended meanwhile, or another user's
            lines = path.read_text(errors="replace").splitlines()
            if any(f"{memory.resolve()}/" in line and not line.endswith("(deleted)") for line in lines):
                found.append(int(path.parent.name))
    return sorted(found)
