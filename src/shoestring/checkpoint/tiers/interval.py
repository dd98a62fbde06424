"""How often to save at each level, from what its checkpoints cost and how often things fail.

Levels 1 … k, the least safe first. λ_l is the rate of the failures that level l recovers from and no level below does;
C_l what a checkpoint at level l costs beside those at all levels below, which go with it; R_l what recovering from it
costs; W_l the work between such checkpoints. To first order, of the time spent working

    Σ_l  C_l / W_l + λ_l (W_l / 2 + R_l)

is lost, least at W_l* = √(2 C_l / λ_l): Young 1974 for one level; Benoit, Cavelan, Le Fèvre, Robert and Sun, "Towards
optimal multi-level checkpointing", IEEE Transactions on Computers 66(7), 2017, for k, with W_{l+1} a multiple of W_l.
`waste` goes further, to where C_l is no longer small beside 1 / λ_l, and `plan` looks around W_l* for its minimum."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from types import MappingProxyType

from shoestring.core.errors import ConfigError

_TRIED = 32  # intervals of the lowest level that are compared at most; between two of them the waste hardly changes


@dataclass(frozen=True)
class Rate:
    """What is believed of how often one class of failures happens: a Gamma distribution, "a failures in b seconds"."""

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
        """The belief once so many failures in so many seconds were seen: their conjugate, in whatever order."""
        if not (failures >= 0 and 0 <= seconds < math.inf):
            raise ConfigError(f"cannot have seen {failures} failures in {seconds} seconds")
        return Rate(self.a + failures, self.b + seconds)


# Hours between failures: what remains of a lost process is its host's memory, of a lost host its peers', of "all" the
# disk only. Each is worth half a failure, so that the first ones seen outweigh it.
_GUESSES = {"process": 4, "host": 24, "all": 240}
PRIORS = MappingProxyType({name: Rate(0.5, 0.5 * 3600 * hours) for name, hours in _GUESSES.items()})


class Rates:
    """The rate of each class of failures, to be kept in the checkpoint."""

    def __init__(self, priors: Mapping[str, Rate] = PRIORS) -> None:
        self._rates = dict(priors)

    def __getitem__(self, name: str) -> float:
        """Failures of the class per second."""
        return self._rates[name].mean

    def observe(self, seconds: float, **failures: int) -> None:
        """Take in that `seconds` more have passed, with so many failures of each class, none where not named."""
        if unknown := failures.keys() - self._rates.keys():
            raise ConfigError(f"no class of failures `{min(unknown)}`", hint=f"valid: {', '.join(self._rates)}")
        self._rates = {name: rate.after(failures.get(name, 0), seconds) for name, rate in self._rates.items()}

    def state_dict(self) -> dict[str, list[float]]:
        return {name: [rate.a, rate.b] for name, rate in self._rates.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Resume from a saved state; a class that it lacks stays as it is."""
        self._rates |= {name: Rate(*state[name]) for name in self._rates if name in state}


@dataclass(frozen=True)
class Level:
    """One level of checkpoints; all in seconds."""

    name: str
    cost: float
    """C: what a checkpoint adds to the run beside those of the levels below: its stall + its slowdown × its
    duration."""
    duration: float
    """From a checkpoint's start to where it can be recovered from; the next one starts no earlier."""
    rate: float
    """λ: failures per second that this level recovers from and none below it does."""
    restart: float
    """R: from the failure to where training continues, without the work that is done again."""
    through: bool = False
    """Whether every checkpoint of a higher level goes through it, and so pays its cost where it is no level of its
    own."""

    def __post_init__(self) -> None:
        times = (self.cost, self.duration, self.restart)
        if not (all(0 <= each < math.inf for each in times) and 0 < self.rate < math.inf):
            raise ConfigError(f"a level needs finite times, none negative, and a positive rate, got {self}")

    @property
    def young_daly(self) -> float:
        """W*: seconds of work between checkpoints, were this the only level (Daly 2006, the higher-order solution)."""
        x = self.cost * self.rate / 2
        if x >= 1:
            return 1 / self.rate
        return math.sqrt(2 * self.cost / self.rate) * (1 + math.sqrt(x) / 3 + x / 9) - self.cost


def plan(levels: Sequence[Level], step_seconds: float) -> dict[str, int]:
    """Steps between checkpoints of each level that pays, at the least `waste`; each is a multiple of the one below.

    A level that does not pay is absent, and its failures fall to the next one up; the highest always stays. Ranks with
    the same input get the same integers, for nothing but correctly rounded arithmetic decides.

    Raises:
        ConfigError: there is no level, two have one name, or a step takes no time.
    """
    _check(levels, step_seconds)
    best: tuple[float, dict[str, int]] = math.inf, {}
    for below in chain.from_iterable(combinations(levels[:-1], number) for number in range(len(levels))):
        used = _used(levels, {level.name for level in (*below, levels[-1])})
        for stretch, steps in _nests(used, step_seconds, 1, step_seconds):
            if stretch < best[0]:
                best = stretch, {level.name: each for level, each in zip(used, steps, strict=True)}
    return best[1]


def waste(levels: Sequence[Level], steps: Mapping[str, int], step_seconds: float) -> float:
    """The share of all time that checkpoints, restarts and work done again will take, with `steps` as from `plan`; 0 to
    1.

    Daly's complete model ("A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22, 2006), one level after the other: from a checkpoint of level l to the next it would
    be D_l = n D'_{l-1} + C_l without failures of class l, and is D'_l = e^{λR} (e^{λD} - 1) / λ with them. Its first
    order is the module's formula. Left out are failures of lower classes during restarts and saves.

    Raises:
        ConfigError: as for `plan`; or the highest level is not used, or one's steps are no multiple of those below.
    """
    _check(levels, step_seconds)
    expected, unit = step_seconds, 1
    if levels[-1].name not in steps or not steps.keys() <= {level.name for level in levels}:
        raise ConfigError(f"`{levels[-1].name}` must be used, and levels that there are, not {list(steps)}")
    for level in _used(levels, steps):
        times, rest = divmod(steps[level.name], unit)
        if times < 1 or rest:
            raise ConfigError(f"level `{level.name}`: {steps[level.name]} steps are no multiple of {unit}")
        expected, unit = _expected(level, times, expected), steps[level.name]
    return 1 - unit * step_seconds / expected


def _check(levels: Sequence[Level], step_seconds: float) -> None:
    names = [level.name for level in levels]
    if not names or len(set(names)) < len(names) or not 0 < step_seconds < math.inf:
        raise ConfigError(f"cannot plan levels {names} with steps of {step_seconds} s")


def _used(levels: Sequence[Level], names: Collection[str]) -> list[Level]:
    """The levels named, each with the failures of those right below it that are not, and the cost of those it needs."""
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
    """Steps between checkpoints around the W* of each level, and before them all time over that of the steps alone.

    Args:
        unit: steps between checkpoints of the level below `levels`; `below` are the expected seconds of so many.
    """
    if not levels:
        yield below / (unit * step_seconds), []
        return
    least = max(1, math.ceil(levels[0].duration / (unit * step_seconds) - 1e-9))
    wanted = max(least, min(level.young_daly for level in levels) / below)
    for times in _around(wanted, least, wide=unit == 1):
        expected = _expected(levels[0], times, below)
        for stretch, steps in _nests(levels[1:], step_seconds, times * unit, expected):
            yield stretch, [times * unit, *steps]


def _around(wanted: float, least: int, *, wide: bool) -> range:
    """The integers next to `wanted`; or about `_TRIED` from its half to its double, where all levels rest on them."""
    first, last = (int(wanted / 2), int(2 * wanted) + 1) if wide else (int(wanted) - 1, int(wanted) + 2)
    return range(max(first, least), last + 1, (last - first) // _TRIED + 1)


def _expected(level: Level, times: int, below: float) -> float:
    """Seconds from one of its checkpoints to the next, with `times` what takes `below` in between; see `waste`."""
    D = times * below + level.cost
    # Work since the start of a lost checkpoint is done again (Vaidya 1997: latency beyond the overhead).
    R = level.restart + max(level.duration - level.cost, 0.0)
    return D * _growth(level.rate * D) * (1 + level.rate * R * _growth(level.rate * R))


def _growth(x: float) -> float:
    """(e^x - 1) / x, by its series up to x⁴, which is finite for any x and rounds alike on all machines."""
    return 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))
