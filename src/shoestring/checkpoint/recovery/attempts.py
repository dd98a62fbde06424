"""Counting the attempts to load a checkpoint, over restarts: what ends the process each time is not loaded for ever.

Only an end that the load itself caused counts: one that left the report of a crash (a segmentation fault, an abort), or
during which the system ended a process for want of memory. A kill from outside strikes a load as it strikes a step, and
says nothing about what is loaded.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator
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

LIMIT = 1 << 20  # bytes of the longest mark
MOST = 10
"""Attempts in a row after which a checkpoint is given up."""


@dataclass(eq=False)
class Attempts:
    """What is known of attempts that did not end; every method is a collective.

    Files in the folder: `.loading-HOST` counts attempts by checkpoint, `.shoestring-attempt-HOST` says which is under
    way and how many processes had been killed for memory by then, and a crash writes its report into
    `.shoestring-crash-RANK`.

    Args:
        folder: of the run's checkpoints; nothing is counted without it.
        host: number of this host, if this rank writes for it.
    """

    group: RankGroup
    files: Files
    folder: Path | None
    host: int | None
    counts: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Find what any rank knows: the most of each. An attempt that ended for no reason of its own is not counted."""
        here = _read(self.folder) if self.folder and self.host is not None else ({}, [], False)
        gathered = self.group.all_gather(here)
        for counts, _, _ in gathered:
            self.counts |= {name: max(count, self.counts.get(name, 0)) for name, count in counts.items()}
        under_way = {name for _, names, _ in gathered for name in names} & self.counts.keys()
        if under_way and not any(caused for _, _, caused in gathered):
            self.counts |= {name: self.counts[name] - 1 for name in under_way}
        if under_way:
            self._write(self.counts)

    def exhausted(self, checkpoint: CheckpointId) -> bool:
        return self.counts.get(checkpoint.name, 0) >= MOST

    @contextmanager
    def counted(self, checkpoint: CheckpointId) -> Iterator[None]:
        """Count what is done as an attempt unless it ends; an error ends it if it does not come of a rank's death."""
        before = dict(self.counts)
        self._write({**before, checkpoint.name: before.get(checkpoint.name, 0) + 1}, checkpoint.name)
        self.group.all_gather(None)  # nobody begins before it is written
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
        """Where it cannot be written, nothing is counted: a disk that cannot be written to may still be read."""
        if self.folder is None or self.host is None:
            return
        with suppress(OSError):
            self._put(f"{MARK}{self.host}", counts)
            for path in [each for each in _marks(self.folder) if each.name.startswith((UNDER_WAY, CRASH))]:
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
        """Have a crash of this process write its report to a file, which is removed at the end."""
        if self.folder is None or (report := self._report(self.folder / f"{CRASH}{self.group.rank}")) is None:
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

    def _report(self, path: Path) -> IO[bytes] | None:
        try:
            self.files.unlink(path)
            self.files.write(path, b"", durable=False)
            return path.open("r+b")
        except OSError:
            return None


def _marks(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if MARKS.fullmatch(path.name) and not path.is_symlink()]
    except OSError:
        return []


def _read(folder: Path) -> tuple[dict[str, int], list[str], bool]:
    """From the files of all hosts that are seen here: the attempts by the names of checkpoints, those that were under
    way, and whether any was ended by what it did. Damaged ones count nothing."""
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
