"""Decides after which steps checkpoints are written at each level, from the settings and from measured costs."""

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

_CLASSES = {MEMORY: "process", PEERS: "host", DISK: "all"}  # class of failures from which each level recovers
_FIRST = {MEMORY: 4, PEERS: 8, DISK: 16}  # initial interval in steps, until costs are measured
_RESTART = 15.0  # seconds from a failure until training continues, without the time to read the state
_SLOWDOWN = 0.1  # assumed relative slowdown of training during a checkpoint, until the slowdown is measured
_LEAST = 0.02  # minimum slowdown: lower values are noise, and disk wear and others' traffic also cost
_STEPS = 100  # number of newest steps, with and without a checkpoint, for the trimmed means
_MINUTE = 60.0  # minimum change of an interval that is reported, in seconds of training
_RECENT = 0.2  # weight of the newest measurement in a moving average


class CheckpointSchedule:
    """The intervals between checkpoints in steps, which are equal on all ranks.

    An interval is fixed by a setting, or planned from costs on which the ranks agree.
    """

    def __init__(self, settings: Tiered, hosts: int) -> None:
        wishes = dict(zip(LEVELS, (settings.memory_every, settings.peers_every, settings.disk_every), strict=True))
        self.settings, self.hosts = settings, hosts
        self.has_peers = hosts > 1 and settings.redundancy != "off"
        if not self.has_peers:
            wishes[PEERS] = 0
        self.auto = [level for level in LEVELS if wishes[level] == "auto"]
        self.steps = {level: _FIRST[level] if level in self.auto else int(wishes[level]) for level in LEVELS}
        self._reach()
        self.replays = False
        """Whether differences are recorded, so that steps after a checkpoint in memory can be replayed after a kill."""
        self.lacking: Mapping[str, str] = dict.fromkeys(LEVELS, "")
        """Maps a level to the reason why it does not work; empty if the level works."""
        self.total = 0
        """Number of steps of the run; 0 if not known."""
        self.rates = Rates()
        self.lost = 0.0
        """Seconds lost to all failures of the run; each failure counts from the restored checkpoint until the run has
        resumed."""
        self._late: set[str] = set()
        self._seconds = {MEMORY: 0.0, PEERS: 0.0, DISK: 0.0}  # average duration of a checkpoint, by level
        self._stall = 0.0  # average seconds for which a checkpoint stops training
        self._steps = {beside: deque[float](maxlen=_STEPS) for beside in (False, True)}
        """Durations of the newest steps in seconds; the key True is for steps during which a checkpoint was being
        written."""
        self._newest = 0.0  # time at which the newest step ended, in seconds
        self._observed = 0  # step up to which failure-free time has been added to `rates`
        self.outlives = True
        """Whether, on all ranks, checkpoints in memory survive the end of their processes."""
        self._announced: dict[str, int] = {}  # the intervals that were last reported to the user

    # -- measuring ----------------------------------------------------------------------------------------------------

    def stepped(self, now: float, step: int, *, beside: bool) -> None:
        """Record the end of a step.

        Args:
            now: current time in seconds.
            beside: whether a checkpoint was being written during the step.
        """
        if self._newest:
            self._steps[beside].append(now - self._newest)
        self._newest = now
        self._observed = self._observed or step

    def stalled(self, seconds: float) -> None:
        """Record for how many seconds a checkpoint has stopped training."""
        self._stall = _mixed(self._stall, seconds)

    def took(self, level: str, seconds: float) -> None:
        """Record how many seconds a checkpoint has taken at a level, while training continued."""
        self._seconds[level] = _mixed(self._seconds[level], seconds)

    def seconds(self, level: str) -> float:
        """Return the average duration of a checkpoint at a level in seconds; 0 if there was no checkpoint yet."""
        return self._seconds[level]

    def costs(self) -> list[float]:
        """Return the costs that this rank has measured, in seconds; the ranks agree on the maximum of each cost."""
        return [*map(_middle, self._steps.values()), self._stall, *self._seconds.values()]

    # -- deciding -----------------------------------------------------------------------------------------------------

    def due(self, step: int) -> set[str]:
        """Return the levels at which a checkpoint is due after this step, by the interval or because an earlier
        checkpoint was postponed."""
        return {level for level in LEVELS if self.steps[level] and step % self.steps[level] == 0} | self._late

    def postpone(self, levels: set[str]) -> None:
        """Postpone the checkpoints at these levels to the next step at which a checkpoint is possible."""
        self._late |= levels

    def done(self, levels: set[str]) -> None:
        """Record that checkpoints at these levels are being written, so that they are no longer postponed."""
        self._late -= levels

    def agreed(self, costs: Sequence[float], step: int) -> None:
        """Plan new intervals from costs on which the ranks have agreed; levels without a measured cost keep their
        intervals.

        Args:
            costs: the maxima of `costs` over all ranks.
        """
        idle, busy, stall, *durations = costs
        seconds = {level: taken for level, taken in zip(LEVELS, durations, strict=True) if taken}
        slowdown = max(_LEAST, busy / idle - 1) if busy and idle else _SLOWDOWN
        on = [level for level in seconds if self.steps[level] or level in self.auto]
        cost = {level: slowdown * seconds[level] + (stall if level == on[0] else 0.0) for level in on}
        levels = [
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
        if not self.auto or not idle or not levels:
            return
        if step > self._observed > 0:
            self.rates.observe((step - self._observed) * idle)
            self._observed = step
        wanted = plan(levels, idle)
        self.steps |= {level: wanted.get(level, 0) for level in self.auto if level in seconds}
        self._reach()

    def _reach(self) -> None:
        """Limit planned intervals, so that differences are always available from the newest checkpoint on."""
        most = self.settings.differences // 2  # half, because completing a checkpoint on all ranks takes some steps
        for level in (MEMORY, *([PEERS] if self.settings.differences_on == "peers" else [])):
            if most and level in self.auto:
                self.steps[level] = min(self.steps[level] or most, most)
        if self.settings.differences and self.settings.differences_on == "disk" and DISK in self.auto:
            most = 4 * self.settings.differences  # limits the size of differences on disk
            self.steps[DISK] = min(self.steps[DISK] or most, most)

    def drop(self, *levels: str) -> None:
        """Turn levels off; all ranks must call this method at the same step."""
        self.steps |= dict.fromkeys(levels, 0)
        self.auto = [level for level in self.auto if level not in levels]
        self.has_peers = self.has_peers and PEERS not in levels
        self._late -= {*levels}

    def failed(self, level: str, seconds: float) -> None:
        """Count a failure after which the run has resumed from this level, and add the seconds that the failure
        cost."""
        self.rates.observe(0.0, **{_CLASSES[level]: 1})
        self.lost += seconds

    @property
    def failures(self) -> int:
        """Number of failures that this run has survived, over all its starts."""
        seen = sum(a for a, _ in self.rates.state_dict().values())
        return round(seen - sum(prior.a for prior in PRIORS.values()))

    # -- reporting ----------------------------------------------------------------------------------------------------

    def news(self) -> str:
        """Return the text of `survives` if it should be logged, otherwise an empty string. The text is logged once all
        levels are measured, and again whenever an interval has changed much.
        """
        measured = self._steps[False] and all(self._seconds[level] or not self.steps[level] for level in self.auto)
        if not measured or not any(map(self._changed, self.auto)):
            return ""
        self._announced = dict(self.steps)
        return self.survives()

    def _changed(self, level: str) -> bool:
        """Whether an interval was never reported, or has changed since the last report by a factor of 2 or more and by
        at least a minute."""
        steps, announced = self.steps[level], self._announced.get(level)
        if announced is None:
            return True
        return (
            2 * min(steps, announced) <= max(steps, announced)
            and abs(steps - announced) * _middle(self._steps[False]) >= _MINUTE
        )

    def survives(self) -> str:
        """Return one line for the user: which failures the run survives, and how many steps each kind of failure costs,
        if known."""
        promises, no_step = [], f"at most the newest step repeated: {self.settings.differences} are replayed"
        works = {level: self.steps[level] > 0 and not self.lacking[level] for level in LEVELS}
        works[MEMORY] &= self.outlives
        if works[MEMORY]:
            promises.append(f"a killed process: yes, from memory, {no_step if self.replays else self._often(MEMORY)}")
        elif self.steps[MEMORY] and works[DISK]:
            promises.append(f"a killed process: yes, from disk, {self._often(DISK)}")
        if works[PEERS]:
            copies = self.settings.redundancy == "copy"
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
        """Return a text on the cost of a failure at a level: the number of steps that are repeated. These are the steps
        of one interval, and the steps during which the next checkpoint is still being written.
        """
        short, most = "at the end only, because the run is short", self.steps[level]
        if level not in self.auto:
            return short if 0 < self.total <= most else f"saved every {most} steps"
        if not self._announced:
            return "saved as often as pays"
        most += math.ceil(self._seconds[level] / _middle(self._steps[False]))
        if 0 < self.total <= most:
            return short
        return f"at most {most} step{'s' * (most > 1)} repeated"

    # -- saved state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates.state_dict(), "lost": self.lost}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rates.load_state_dict(state_dict["rates"])
        self.lost = float(state_dict.get("lost", 0.0))


def _middle(values: Iterable[float]) -> float:
    """Return the trimmed mean, without the highest and the lowest tenth of the values; 0 if there are no values."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return fmean(ordered[cut : len(ordered) - cut] or [0.0])


def _mixed(before: float, now: float) -> float:
    """Return the new value of a moving average; the first measurement is used unchanged."""
    return now if not before else (1 - _RECENT) * before + _RECENT * now
