"""At which steps each level saves, and what that is decided by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from shoestring.checkpoint.tiers.interval import PRIORS, Level, Rates, plan

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered

MEMORY: Final = "memory"
PEERS: Final = "peers"
DISK: Final = "disk"
LEVELS: Final = (MEMORY, PEERS, DISK)

_CLASSES = {MEMORY: "process", PEERS: "host", DISK: "all"}  # of the failures that a level is for
_FIRST = {MEMORY: 4, PEERS: 8, DISK: 16}  # steps until the first checkpoint of each, where nothing is measured yet
_RESTART = 15.0  # seconds from a failure to where training continues, beside what reading the state takes
_SLOWDOWN = 0.1  # what a checkpoint beside training slows it down, until that is measured
_LEAST = 0.02  # below that it is noise; and nothing is free that wears a disk or takes a link from others
_STEPS = 100  # of the newest steps of each kind the mean is taken, without the extreme tenths: evaluation is among them
_MINUTE = 60.0  # seconds of training; a difference below is no news
_RECENT = 0.2  # weight of the newest measurement


class CheckpointSchedule:
    """Steps between checkpoints, the same on all ranks: numbers from the run file, or planned from costs that are
    agreed."""

    def __init__(self, settings: Tiered, hosts: int) -> None:
        wishes = dict(zip(LEVELS, (settings.memory_every, settings.peers_every, settings.disk_every), strict=True))
        self.settings, self.hosts = settings, hosts
        self.has_peers = hosts > 1 and settings.peers != "off"
        if not self.has_peers:
            wishes[PEERS] = 0
        self.auto = [level for level in LEVELS if wishes[level] == "auto"]
        self.steps = {level: _FIRST[level] if level in self.auto else int(wishes[level]) for level in LEVELS}
        self._reach()
        self.replays = False
        """Whether the steps after a checkpoint in memory are kept, and replayed after a kill."""
        self.lacking: Mapping[str, str] = dict.fromkeys(LEVELS, "")
        """Why a level does not work."""
        self.total = 0
        """Steps of the run; 0 where that is not known."""
        self.rates = Rates()
        self.lost = 0.0
        """Seconds that failures took, over all starts: from a restored checkpoint to where training resumed."""
        self._late: set[str] = set()
        self._seconds = {MEMORY: 0.0, PEERS: 0.0, DISK: 0.0}  # from a checkpoint's start to its end
        self._stall = 0.0  # seconds that a checkpoint stops training for
        self._steps = {beside: deque[float](maxlen=_STEPS) for beside in (False, True)}
        """Seconds of the newest steps, without and with a checkpoint beside them."""
        self._newest = 0.0
        self._observed = 0
        self.outlives = True
        """Whether what is in memory outlives a process, on all ranks."""
        self._announced: dict[str, int] = {}  # steps between checkpoints, as the user was last told

    # -- measuring ----------------------------------------------------------------------------------------------------

    def stepped(self, now: float, step: int, *, beside: bool) -> None:
        """A step has ended."""
        if self._newest:
            self._steps[beside].append(now - self._newest)
        self._newest = now
        self._observed = self._observed or step

    def stalled(self, seconds: float) -> None:
        """A checkpoint has stopped training for so long."""
        self._stall = _mixed(self._stall, seconds)

    def took(self, level: str, seconds: float) -> None:
        """A checkpoint has taken so long at a level, beside training."""
        self._seconds[level] = _mixed(self._seconds[level], seconds)

    def seconds(self, level: str) -> float:
        """What a checkpoint takes at a level; 0 where there was none yet."""
        return self._seconds[level]

    def costs(self) -> list[float]:
        """What is measured on this rank; the ranks take the largest of each."""
        return [*map(_middle, self._steps.values()), self._stall, *self._seconds.values()]

    # -- deciding -----------------------------------------------------------------------------------------------------

    def due(self, step: int) -> set[str]:
        """The levels that save after this step, or were to save earlier; every checkpoint goes through memory."""
        return {level for level in LEVELS if self.steps[level] and step % self.steps[level] == 0} | self._late

    def postpone(self, levels: set[str]) -> None:
        """Save at these after the next step: now was too early."""
        self._late |= levels

    def done(self, levels: set[str]) -> None:
        """What was due, late or not, is under way."""
        self._late -= levels

    def agreed(self, costs: Sequence[float], step: int) -> None:
        """Plan again from the costs that the ranks have agreed on; a level that has none yet stays as it is."""
        idle, busy, stall, *durations = costs
        seconds = {level: taken for level, taken in zip(LEVELS, durations, strict=True) if taken}
        slowdown = max(_LEAST, busy / idle - 1) if busy and idle else _SLOWDOWN
        levels = self._levels(slowdown, stall, seconds)
        if not self.auto or not idle or not levels:
            return
        if step > self._observed > 0:
            self.rates.observe((step - self._observed) * idle)
            self._observed = step
        wanted = plan(levels, idle)
        self.steps |= {level: wanted.get(level, 0) for level in self.auto if level in seconds}
        self._reach()

    def _reach(self) -> None:
        """Save so often that differences lead from there to the newest step; half of them, for a checkpoint takes some
        steps until it is sealed on all ranks."""
        most = self.settings.differences // 2
        for level in (MEMORY, *([PEERS] if self.settings.differences_on == "peers" else [])):
            if most and level in self.auto:
                self.steps[level] = min(self.steps[level] or most, most)
        if self.settings.differences and self.settings.differences_on == "disk" and DISK in self.auto:
            most = 4 * self.settings.differences  # what is written between two is a few times a checkpoint
            self.steps[DISK] = min(self.steps[DISK] or most, most)

    def _levels(self, slowdown: float, stall: float, seconds: Mapping[str, float]) -> list[Level]:
        on = [level for level in seconds if self.steps[level] or level in self.auto]
        cost = {level: slowdown * seconds[level] + (stall if level == on[0] else 0.0) for level in on}
        return [
            Level(
                level,
                cost[level],
                seconds[level],
                self.rates[_CLASSES[level]],
                _RESTART + seconds[level],
                through=level == MEMORY,
            )
            for level in on
        ]

    def drop(self, *levels: str) -> None:
        """Save at these no more; on all ranks at once."""
        self.steps |= dict.fromkeys(levels, 0)
        self.auto = [level for level in self.auto if level not in levels]
        self.has_peers = self.has_peers and PEERS not in levels
        self._late -= {*levels}

    def failed(self, level: str, seconds: float) -> None:
        """The run resumes from this level: a failure that no level below it recovers from, and that took so long."""
        self.rates.observe(0.0, **{_CLASSES[level]: 1})
        self.lost += seconds

    @property
    def failures(self) -> int:
        """What this run has survived so far, over all its starts."""
        seen = sum(a for a, _ in self.rates.state_dict().values())
        return round(seen - sum(prior.a for prior in PRIORS.values()))

    # -- what is said -------------------------------------------------------------------------------------------------

    def news(self) -> str:
        """What the run will survive, if that is news: all levels were measured, or one changed twofold by a minute."""
        measured = self._steps[False] and all(self._seconds[level] or not self.steps[level] for level in self.auto)
        if not measured or not any(map(self._changed, self.auto)):
            return ""
        self._announced = dict(self.steps)
        return self.survives()

    def _changed(self, level: str) -> bool:
        steps, announced = self.steps[level], self._announced.get(level)
        if announced is None:
            return True
        return (
            2 * min(steps, announced) <= max(steps, announced)
            and abs(steps - announced) * _middle(self._steps[False]) >= _MINUTE
        )

    def survives(self) -> str:
        """What the run will survive, in a line; at what price in steps where that is known."""
        promises, no_step = [], f"at most the newest step repeated: {self.settings.differences} are replayed"
        works = {level: self.steps[level] > 0 and not self.lacking[level] for level in LEVELS}
        works[MEMORY] &= self.outlives
        if works[MEMORY]:
            promises.append(f"a killed process: yes, from memory, {no_step if self.replays else self._often(MEMORY)}")
        elif self.steps[MEMORY] and works[DISK]:
            promises.append(f"a killed process: yes, from disk, {self._often(DISK)}")
        if works[PEERS]:
            copies = self.settings.peers == "copy"
            how = "by copies on others" if copies else f"by parity over sets of {self.settings.set_size}"
            replays = self.replays and self.settings.differences_on != "memory"
            promises.append(f"one host of {self.hosts} lost: yes, {how}, {no_step if replays else self._often(PEERS)}")
        if works[DISK]:
            batches = f"and differences, {self.settings.differences // 2} steps at once"
            often = batches if self.replays and self.settings.differences_on == "disk" else self._often(DISK)
            return "; ".join([*promises, f"all of it lost: yes, from disk, {often}"])
        if self.steps[DISK]:
            return "; ".join([*promises, "all of it lost: no, the disk takes no checkpoints"])
        return "; ".join([*promises, "to disk at the end and on a signal"])

    def _often(self, level: str) -> str:
        """What a failure costs: the steps since a checkpoint, and those beside which that one was still on its way."""
        short, most = "at the end only, for the run is short", self.steps[level]
        if level not in self.auto:
            return short if 0 < self.total <= most else f"saved every {most} steps"
        if not self._announced:
            return "saved as often as pays"
        most += math.ceil(self._seconds[level] / _middle(self._steps[False]))
        if 0 < self.total <= most:
            return short
        return f"at most {most} step{'s' * (most > 1)} repeated"

    # -- what survives ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates.state_dict(), "lost": self.lost}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rates.load_state_dict(state_dict["rates"])
        self.lost = float(state_dict.get("lost", 0.0))


def _middle(values: Iterable[float]) -> float:
    """The mean without the extreme tenths; 0 where there are none."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return fmean(ordered[cut : len(ordered) - cut] or [0.0])


def _mixed(before: float, now: float) -> float:
    return now if not before else (1 - _RECENT) * before + _RECENT * now
