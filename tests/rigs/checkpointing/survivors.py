"""What is left of a run between two of its starts, and the step that the next one must resume from at least."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.tiers.save_schedule import DISK, LEVELS, MEMORY, PEERS
from shoestring.core.errors import CheckpointError
from tests.rigs.checkpointing.damage import DAMAGES, cut, places, whole
from tests.rigs.checkpointing.known import PAGE, RunSetup

DIFFERENCES = "differences"


@dataclass
class Survivors:
    """What was said to be safe, and what has happened to it since.

    What is safe at a level survives what the level is for: nobody looks whether its files are there, for that is what
    is judged. Only where files were damaged, a model of the redundancy says which of the safe steps are whole.
    """

    setup: RunSetup
    under: str
    acked: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*LEVELS, DIFFERENCES), 0))
    """The newest step that is safe at each level."""
    base: int = 0
    """The step that the newest start resumed from."""
    lost: set[int] = field(default_factory=set)
    """Hosts, since the newest start."""
    harmed: bool = False
    """Whether files were damaged since then."""
    hurt: dict[Path, bytes | None] = field(default_factory=dict)
    """Damaged files, and what is in them since; None where they are missing."""

    def safe(self, told: Iterable[Sequence[int]], *, replayed: bool) -> None:
        """A start said what is safe: the steps of each level, and of its differences."""
        for each in told:
            for level, step in zip(self.acked, each, strict=True):
                if level != DIFFERENCES or replayed:
                    self.acked[level] = max(self.acked[level], step)

    def resumed(self, step: int) -> None:
        """A start resumed from a step: what came after it is abandoned.

        What was safe before files were damaged, or at peers before one was lost, is so again once it is saved again.
        """
        gone = {*LEVELS, DIFFERENCES} if self.harmed else {PEERS} if self.lost else set()
        self.acked = {level: 0 if level in gone or safe > step else safe for level, safe in self.acked.items()}
        self.base, self.harmed = step, False
        self.lost.clear()

    def ended(self) -> None:
        """The run came to its end: everything is on disk, and nothing in memory any more."""
        self.acked |= dict.fromkeys((MEMORY, PEERS, DIFFERENCES), 0)

    def forget(self) -> None:
        """Nothing that was said until now needs to hold."""
        self.acked, self.base = dict.fromkeys(self.acked, 0), 0

    # -- faults -------------------------------------------------------------------------------------------------------

    def lose(self, hosts: Iterable[int]) -> None:
        """Lose the memory of hosts, and the disks that they have of their own."""
        for host in hosts:
            self.lost.add(host)
            shutil.rmtree(self.setup.memory(host), ignore_errors=True)
            if not self.setup.shared:
                shutil.rmtree(self.setup.disk(host), ignore_errors=True)

    def damage(self, name: str, seed: int) -> bool:
        """Damage something that is whole; whether there was anything."""
        draw, bad = random.Random(seed), self._bad()
        there = [place for place in places(self.setup) if not bad & {place.record, *place.parts.values()}]
        there = [place for place in there if all(path.exists() for path in place.parts.values())]
        if name == DIFFERENCES:
            return self._damage_differences(draw)
        cut(there)
        struck = DAMAGES[name](there, draw) if there else None
        for path in struck or ():
            self.hurt[path] = path.read_bytes() if path.exists() else None
            self.harmed = True
        return bool(struck)

    def _damage_differences(self, draw: random.Random) -> bool:
        found = [path for ending in ("ring", "differences") for path in self.setup.place.glob(f"now/**/*.{ending}")]
        if not found:
            return False
        path = draw.choice(sorted(found))
        data = bytearray(path.read_bytes())
        start = draw.randrange(len(data))
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
        path.write_bytes(data)
        self.acked[DIFFERENCES] = self.base = 0
        return True

    def _bad(self) -> set[Path]:
        """The damaged files that nobody has written again."""
        return {path for path, left in self.hurt.items() if left == (path.read_bytes() if path.exists() else None)}

    # -- what must be resumed -----------------------------------------------------------------------------------------

    def least(self) -> int:
        """The step that the next start must resume from, or from a later one."""
        if bad := self._bad():
            return self._whole(bad)
        if not self.lost:
            return max(*self.acked.values(), self.base)
        alone = len(self.lost) == 1 and self.setup.hosts > 1
        return max(self.acked[PEERS] if alone else 0, self.on_disk())

    def intact(self) -> int:
        """The same for a start that has followed one at once; where files are damaged, that is not known."""
        return 0 if self._bad() else self.least()

    def on_disk(self) -> int:
        """The step that hosts with nothing but the disk must resume from at least."""
        return 0 if self._bad() or not self.setup.shared else self.acked[DISK]

    def _whole(self, bad: set[Path]) -> int:
        """The newest of the safe steps of which every byte can still be had."""
        history = self._history()
        left = [each for each in places(self.setup) if each.record not in bad]
        left = [each for each in left if history and history.holds(each.checkpoint)]
        steps = {self.base, *(self.acked[level] for level in (MEMORY, PEERS, DISK))}
        return max((step for step in steps if whole(self.setup, [p for p in left if p.step == step], bad)), default=0)

    def _history(self) -> History | None:
        found = []
        for host in range(self.setup.hosts):
            try:
                found.append(History.read(self.setup.disk(host)))
            except CheckpointError:
                continue
        return max((each for each in found if each), key=lambda each: each.epoch.start, default=None)
