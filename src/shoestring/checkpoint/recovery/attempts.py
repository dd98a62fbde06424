"""Counts attempts to load a checkpoint across restarts, so that a run gives up a checkpoint that crashes every process.

An attempt counts as failed only if loading itself ended the process: a crash (a segmentation fault, an abort) left its
report, or the system killed a process for lack of memory during the attempt. If a user or scheduler killed the process,
the attempt does not count.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.tiers.disk import CRASH, MARK, MARKS, UNDER_WAY
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.planning.system import kills_for_memory
from shoestring.storage.guarded import read_regular

LIMIT = 1 << 20  # maximum size of a file with counts, in bytes
MOST = 10
"""Number of consecutive failed attempts after which a checkpoint is given up."""


@dataclass(eq=False)
class Attempts:
    """Counts consecutive unfinished attempts to load each checkpoint; every method is a collective.

    The counts are stored in the folder of the checkpoints. `.loading-HOST` holds the number of attempts for each
    checkpoint. `.shoestring-attempt-HOST` names the checkpoint that is being loaded, and the number of processes that
    the system had killed for lack of memory before the attempt. A crash writes its report to `.shoestring-crash-RANK`.

    Args:
        folder: folder of the run's checkpoints; None turns counting off.
        host: index of this host on the rank that writes the host's files; None on the other ranks.
        counts: maps the name of a checkpoint to its number of consecutive unfinished attempts.
    """

    group: RankGroup
    files: Files
    folder: Path | None
    host: int | None
    counts: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Gather the counts of all hosts. An attempt that ended for a reason other than loading itself is not
        counted."""
        here = read_marks(self.folder) if self.folder and self.host is not None else ({}, [], False)
        self.counts, under_way = judge(self.group.all_gather(here))
        if under_way:
            self._write(self.counts)

    @contextmanager
    def counted(self, checkpoint: CheckpointId) -> Iterator[None]:
        """Context manager for an attempt to load `checkpoint`. If loading finishes, the checkpoint's count is cleared.
        An exception restores the former count, except for RuntimeError and OSError, which the death of another rank
        may cause.
        """
        before = dict(self.counts)
        self._write({**before, checkpoint.name: before.get(checkpoint.name, 0) + 1}, checkpoint.name)
        self.group.all_gather(None)  # no rank begins to load before the attempt is recorded on disk
        with self._reported():
            try:
                yield
            except (RuntimeError, OSError):
                raise
            except BaseException:
                self._write(before)
                raise
        self._write({name: count for name, count in before.items() if name != checkpoint.name})

    def _write(self, counts: dict[str, int], under_way: str = "") -> None:
        """Write the counts and, during an attempt, the name of the checkpoint that is being loaded.

        Errors are ignored, so that a run can also resume from a read-only disk.
        """
        if self.folder is None or self.host is None:
            return
        with suppress(OSError):
            self._put(f"{MARK}{self.host}", counts)
            for path in _marks(self.folder):
                if path.name.startswith((UNDER_WAY, CRASH)):
                    self.files.unlink(path)
            if under_way:
                self._put(f"{UNDER_WAY}{self.host}", {"name": under_way, "kills": kills_for_memory()})

    def _put(self, name: str, content: dict[str, Any]) -> None:
        assert self.folder is not None
        if content:
            self.files.folder(self.folder)
            self.files.replace(self.folder / name, json.dumps(content).encode(), durable=False)
        else:
            self.files.unlink(self.folder / name)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Context manager that makes a crash of this process write a report to a file; the file is removed at the
        end."""
        report: IO[bytes] | None = None
        if self.folder is not None:
            path = self.folder / f"{CRASH}{self.group.rank}"
            with suppress(OSError):  # without a report, a crash is not counted
                self.files.unlink(path)
                self.files.write(path, b"", durable=False)
                report = path.open("r+b")
        if report is None:
            yield
            return
        enabled = faulthandler.is_enabled()
        faulthandler.enable(report)
        try:
            yield
        finally:
            if enabled:
                faulthandler.enable(2)
            else:
                faulthandler.disable()
            report.close()
            with suppress(OSError):
                self.files.unlink(Path(report.name))


def _marks(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if MARKS.fullmatch(path.name) and not path.is_symlink()]
    except OSError:
        return []


def judge(marks: Iterable[Sequence[Any]]) -> tuple[dict[str, int], bool]:
    """Merge the results of `read_marks` on all hosts.

    Returns:
        The maximum number of attempts over all hosts, by the checkpoint's name, and whether any attempt had not
        finished. An attempt that ended for a reason other than loading itself is not counted.
    """
    counts, pending, caused_by_load = dict[str, int](), set[str](), False
    for counted, names, caused in marks:
        for name, count in counted.items():
            counts[name] = max(count, counts.get(name, 0))
        pending |= {*names}
        caused_by_load = caused_by_load or caused
    pending &= counts.keys()
    if not caused_by_load:
        counts |= {name: counts[name] - 1 for name in pending}
    return counts, bool(pending)


def read_marks(folder: Path) -> tuple[dict[str, int], list[str], bool]:
    """Read the files in which all hosts that share this folder count attempts. Damaged files are ignored.

    Returns:
        The number of attempts, by the checkpoint's name; the names of the checkpoints that were being loaded when a
        process ended; and whether loading itself ended a process.
    """
    counts: dict[str, int] = {}
    under_way, caused = [], False
    for path in _marks(folder):
        with suppress(OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError, KeyError):
            if path.name.startswith(CRASH):
                caused = caused or path.stat().st_size > 0
            elif path.name.startswith(UNDER_WAY):
                mark = json.loads(read_regular(path, LIMIT))
                under_way.append(str(mark["name"]))
                caused = caused or kills_for_memory() > int(mark["kills"])
            else:
                for name, count in json.loads(read_regular(path, LIMIT)).items():
                    counts[name] = max(int(count), counts.get(name, 0))
    return counts, under_way, caused
