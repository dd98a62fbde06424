"""`shoestring checkpoint trim`: deletes all but the newest checkpoints of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shoestring.checkpoint.recovery.resume import forget_all
from shoestring.checkpoint.tiers.claim import is_locked
from shoestring.checkpoint.tiers.disk import ASIDE, Disk
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.verbs.archive import DISK, Archive, find_damage


def trim(run: Path, keep: int, *, memory: bool = False) -> list[Path]:
    """Delete all but the newest checkpoints of a run on disk, after verifying the checkpoints that will remain.

    Abandoned checkpoints are deleted too, unless there are no others. A checkpoint is abandoned if the run has since
    resumed from an earlier step.

    Args:
        keep: number of checkpoints that remain.
        memory: whether to delete also the checkpoints that a dead run left in this host's memory.

    Returns:
        The paths that were deleted.

    Raises:
        ConfigError: `keep` is below 1.
        CheckpointError: there are no checkpoints, a checkpoint that would remain is damaged, or the run is alive.
    """
    if keep < 1:
        raise ConfigError(f"--keep must be at least 1, got {keep}")
    archive = Archive.of(run)
    going = users(archive.memory)
    if memory and going:
        listed = ", ".join(map(str, going))
        raise CheckpointError(f"`{archive.memory}` is in use by process {listed}", hint="end the run first")
    every = archive.found() if memory and archive.memory.exists() else archive.some()
    there = [checkpoint for checkpoint in every if checkpoint.level == DISK and not checkpoint.path.is_symlink()]
    good = [checkpoint for checkpoint in there if not checkpoint.state.startswith(("not", "damaged"))]
    staying = ([checkpoint for checkpoint in good if not checkpoint.abandoned] or good)[:keep]
    for checkpoint in staying:
        if wrong := find_damage(checkpoint):
            raise CheckpointError(
                f"nothing is deleted: the checkpoint of step {checkpoint.step} is damaged: {wrong[0]}",
                hint="delete that checkpoint first",
            )
    # Remove what interrupted writes have left. Skip folders of other programs, whose names may also begin with `step-`,
    # and remove nothing while a run, perhaps on another host, may be writing here.
    left = [
        checkpoint
        for checkpoint in there
        if ASIDE.fullmatch(checkpoint.path.name) and not going and not is_locked(archive.folder)
    ]
    gone = [checkpoint.path for checkpoint in (*good, *left) if checkpoint not in staying]
    for path in gone:
        if path.is_file():
            path.unlink(missing_ok=True)
    Disk(archive.folder, Files()).retire(path for path in gone if path.is_dir())
    if memory and archive.memory.exists():
        forget_all(archive.memory)
        gone.append(archive.memory)
    return gone


def users(memory: Path) -> list[int]:
    """IDs of the processes on this host that have the checkpoint slots of a run mapped into memory."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            lines = path.read_text(errors="replace").splitlines()
            if any(f"{memory.resolve()}/" in line and not line.endswith("(deleted)") for line in lines):
                pids.append(int(path.parent.name))
    return sorted(pids)
