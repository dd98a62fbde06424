"""Plans how often to write checkpoints at each level, from the costs of checkpoints and the rates of failures.

Levels are numbered 1 … k, from the least safe level to the safest. λ_l is the rate of failures from which level l can
recover but no lower level can. C_l is the cost of a checkpoint at level l, in addition to the checkpoints at all lower
levels, which are made with it. R_l is the cost of recovering from level l. W_l is the work between two checkpoints of
level l. To first order, the lost time, as a fraction of the time of the work, is

    Σ_l  C_l / W_l + λ_l (W_l / 2 + R_l)

The minimum of this sum is at W_l* = √(2 C_l / λ_l). For one level this is Young's formula (1974). For k levels, where
W_{l+1} is a multiple of W_l, the result was derived by Benoit, Cavelan, Le Fèvre, Robert and Sun, "Towards optimal
multi-level checkpointing", IEEE Transactions on Computers 66(7), 2017. The function `waste` is also accurate if C_l is
not small compared with 1 / λ_l, and `plan` searches for the minimum of `waste` near W_l*."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from types import MappingProxyType

from shoestring.core.errors import ConfigError

_TRIED = 32  # maximum number of lowest-level intervals to compare; neighbours differ little in waste


@dataclass(frozen=True)
class Rate:
    """Estimate of a failure rate: a Gamma distribution, which corresponds to `a` failures observed in `b` seconds."""

    a: float
    b: float

    def __post_init__(self) -> None:
        if not (0 < self.a < math.inf and 0 < self.b < math.inf):
            raise ConfigError(f"a rate needs positive numbers, got {self.a} failures in {self.b} seconds")

    @property
    def mean(self) -> float:
        """Failures per second."""
        return self.a / self.b

    def after(self, failures: int, seconds: float) -> Rate:
        """Return the estimate after `failures` more failures in `seconds`, by the conjugate update of the Gamma
        distribution."""
        if not (failures >= 0 and 0 <= seconds < math.inf):
            raise ConfigError(f"cannot have seen {failures} failures in {seconds} seconds")
        return Rate(self.a + failures, self.b + seconds)


# Guessed hours between failures, by class. The memory level survives the loss of a process, the peers level survives
# the loss of a host, and only the disk level survives the loss of all hosts ("all"). A guess has the weight of half a
# failure, so the first failures that a run observes outweigh the guess.
_GUESSES = {"process": 4, "host": 24, "all": 240}
PRIORS = MappingProxyType({name: Rate(0.5, 0.5 * 3600 * hours) for name, hours in _GUESSES.items()})


class Rates:
    """Estimates of the failure rates of all classes; these are saved as a state in checkpoints."""

    def __init__(self, priors: Mapping[str, Rate] = PRIORS) -> None:
        self._rates = dict(priors)

    def __getitem__(self, name: str) -> float:
        """Estimated failures per second of the class `name`."""
        return self._rates[name].mean

    def observe(self, seconds: float, **failures: int) -> None:
        """Add an observation of `seconds` with the given numbers of failures by class; unnamed classes had no
        failures."""
        if unknown := failures.keys() - self._rates.keys():
            raise ConfigError(f"no class of failures `{min(unknown)}`", hint=f"valid: {', '.join(self._rates)}")
        self._rates = {name: rate.after(failures.get(name, 0), seconds) for name, rate in self._rates.items()}

    def state_dict(self) -> dict[str, list[float]]:
        return {name: [rate.a, rate.b] for name, rate in self._rates.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Load a saved state; classes that are missing in the state do not change."""
        self._rates |= {name: Rate(*state[name]) for name in self._rates if name in state}


@dataclass(frozen=True)
class Level:
    """One level of checkpoints, with its costs in seconds."""

    name: str
    cost: float
    """C: seconds that a checkpoint adds to the run (stall + slowdown × duration), without the costs of lower levels."""
    duration: float
    """Seconds from the start of a checkpoint until the run can resume from it; the next checkpoint does not start
    earlier."""
    rate: float
    """λ: failures per second from which this level can recover but no lower level can."""
    restart: float
    """R: seconds from a failure until training continues, without the time for repeated steps."""
    through: bool = False
    """Whether checkpoints of higher levels are first written to this level, so that its cost is paid even if the level
    is unused."""

    def __post_init__(self) -> None:
        times = (self.cost, self.duration, self.restart)
        if not (all(0 <= seconds < math.inf for seconds in times) and 0 < self.rate < math.inf):
            raise ConfigError(f"a level needs finite, non-negative times and a positive rate, got {self}")

    @property
    def young_daly(self) -> float:
        """W*: optimal seconds of work between checkpoints if there were only this level (Daly 2006, higher order)."""
        x = self.cost * self.rate / 2
        if x >= 1:
            return 1 / self.rate
        return math.sqrt(2 * self.cost / self.rate) * (1 + math.sqrt(x) / 3 + x / 9) - self.cost


def plan(levels: Sequence[Level], step_seconds: float) -> dict[str, int]:
    """Find the intervals with the least `waste`; returns a mapping from a level's name to the steps between its
    checkpoints.

    Each interval is a multiple of the interval of the next lower level. A level that is not worth its cost is left out,
    and the next higher level recovers from that level's failures; the highest level is always used. The result is the
    same on all ranks for equal inputs, because only correctly rounded arithmetic is used.

    Raises:
        ConfigError: there is no level, two levels have the same name, or a step takes no time.
    """
    _check(levels, step_seconds)
    best: tuple[float, dict[str, int]] = math.inf, {}
    for below in chain.from_iterable(combinations(levels[:-1], number) for number in range(len(levels))):
        used = _used(levels, {level.name for level in (*below, levels[-1])})
        for stretch, steps in _nests(used, step_seconds, 1, step_seconds):
            if stretch < best[0]:
                best = stretch, {level.name: interval for level, interval in zip(used, steps, strict=True)}
    return best[1]


def waste(levels: Sequence[Level], steps: Mapping[str, int], step_seconds: float) -> float:
    """Compute the fraction of the total time, from 0 to 1, that checkpoints, restarts and repeated steps take.

    Daly's complete model ("A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22, 2006) is applied level by level. From one checkpoint of level l to the next, the
    time is D_l = n D'_{l-1} + C_l without failures of class l, and D'_l = e^{λR} (e^{λD} - 1) / λ with such failures.
    To first order, the result is the formula at the top of this file. Failures of lower classes during restarts and
    checkpoints are neglected.

    Args:
        steps: maps a level's name to the steps between its checkpoints, as the result of `plan` does.

    Raises:
        ConfigError: as for `plan`; or the highest level is not used; or the steps of a level are not a multiple of the
            next lower level's steps.
    """
    _check(levels, step_seconds)
    expected, unit = step_seconds, 1
    if levels[-1].name not in steps or not steps.keys() <= {level.name for level in levels}:
        known = ", ".join(level.name for level in levels)
        raise ConfigError(f"`steps` must contain `{levels[-1].name}` and only levels from {known}, got {list(steps)}")
    for level in _used(levels, steps):
        times, rest = divmod(steps[level.name], unit)
        if times < 1 or rest:
            raise ConfigError(f"level `{level.name}`: {steps[level.name]} steps are not a multiple of {unit}")
        expected, unit = _expected(level, times, expected), steps[level.name]
    return 1 - unit * step_seconds / expected


def _check(levels: Sequence[Level], step_seconds: float) -> None:
    names = [level.name for level in levels]
    if not names or len(set(names)) < len(names) or not 0 < step_seconds < math.inf:
        raise ConfigError(f"cannot plan levels {names} with steps of {step_seconds} s")


def _used(levels: Sequence[Level], names: Collection[str]) -> list[Level]:
    """Return the levels with these names. The rates of unused lower levels are added to the next used level, and so are
    the costs of unused levels with `through`."""
    used, rate, cost = [], 0.0, 0.0
    for level in levels:
        rate += level.rate
        if level.name in names:
            used.append(replace(level, rate=rate, cost=level.cost + cost))
            rate = cost = 0.0
        elif level.through:
            cost += level.cost
    return used


def _nests(levels: Sequence[Level], step_seconds: float, unit: int, below: float) -> Iterator[tuple[float, list[int]]]:
    """Yield candidates for the intervals of `levels`, near the W* of each level.

    Args:
        unit: steps between checkpoints of the level beneath the first of `levels`.
        below: expected seconds of `unit` steps.

    Yields:
        Pairs of the expected time, relative to the time of the steps alone, and the steps between checkpoints of each
        level.
    """
    if not levels:
        yield below / (unit * step_seconds), []
        return
    least = max(1, math.ceil(levels[0].duration / (unit * step_seconds) - 1e-9))
    wanted = max(least, min(level.young_daly for level in levels) / below)
    # Try the integers next to the wanted number. All other intervals are multiples of the lowest level's interval, so
    # for the lowest level try all integers from half to twice the wanted number.
    first, last = (int(wanted / 2), int(2 * wanted) + 1) if unit == 1 else (int(wanted) - 1, int(wanted) + 2)
    for times in range(max(first, least), last + 1, (last - first) // _TRIED + 1):
        expected = _expected(levels[0], times, below)
        for stretch, steps in _nests(levels[1:], step_seconds, times * unit, expected):
            yield stretch, [times * unit, *steps]


def _expected(level: Level, times: int, below: float) -> float:
    """Return the expected seconds from one checkpoint of a level to the next, with `times` intervals of the next lower
    level that take `below` seconds each."""
    D = times * below + level.cost
    # If a failure interrupts a checkpoint, the work since the start of that checkpoint is repeated too (Vaidya 1997:
    # latency beyond the overhead).
    R = level.restart + max(level.duration - level.cost, 0.0)
    return D * _growth(level.rate * D) * (1 + level.rate * R * _growth(level.rate * R))


def _growth(x: float) -> float:
    """Compute (e^x - 1) / x by its series up to x⁴, which never overflows and rounds equally on all machines."""
    return 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))
