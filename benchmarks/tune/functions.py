"""tune.gp*: trials that samplers need on six standard functions, one at a time and with eight running at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import Trial, TrialState

from benchmarks.harness import Bar, Deadline, Measured, stored
from benchmarks.intervals import normal
from shoestring.tune.distributions import suggest
from shoestring.tune.search import NumberedSampler, sampler
from shoestring.tune.settings import Study
from shoestring.tune.space import Dimension, draw

SEEDS, MOST, BATCH = 20, 400, 8
RANDOM_TRIALS = 100
"""The target of a function is what half of all random searches reach with so many trials."""

Point = Sequence[float]


def branin(x: Point) -> float:
    a, b = x
    bent = b - 5.1 * a**2 / (4 * math.pi**2) + 5 * a / math.pi - 6
    return bent**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(a) + 10


def camel(x: Point) -> float:
    """Six-hump camel."""
    a, b = x
    return (4 - 2.1 * a**2 + a**4 / 3) * a**2 + a * b + (4 * b**2 - 4) * b**2


def levy(x: Point) -> float:
    w = 1 + (np.asarray(x) - 1) / 4
    middle = np.sum((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * w[:-1] + 1) ** 2))
    last = (w[-1] - 1) ** 2 * (1 + np.sin(2 * math.pi * w[-1]) ** 2)
    return float(np.sin(math.pi * w[0]) ** 2 + middle + last)


def rosenbrock(x: Point) -> float:
    a = np.asarray(x)
    return float(np.sum(100 * (a[1:] - a[:-1] ** 2) ** 2 + (1 - a[:-1]) ** 2))


_WEIGHTS = np.array([1.0, 1.2, 3.0, 3.2])
_HARTMANN3 = (
    np.array([[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]]),
    1e-4 * np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]]),
)
_HARTMANN6 = (
    np.array([
        [10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14],
    ]),
    1e-4 * np.array([
        [1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381],
    ]),
)  # fmt: skip


def hartmann(constants: tuple[Any, Any]) -> Callable[[Point], float]:
    slopes, centres = constants
    return lambda x: float(-np.sum(_WEIGHTS * np.exp(-np.sum(slopes * (np.asarray(x) - centres) ** 2, axis=1))))


FUNCTIONS: dict[str, tuple[Callable[[Point], float], Sequence[tuple[float, float]]]] = {
    "branin": (branin, [(-5.0, 10.0), (0.0, 15.0)]),
    "camel": (camel, [(-3.0, 3.0), (-2.0, 2.0)]),
    "hartmann3": (hartmann(_HARTMANN3), [(0.0, 1.0)] * 3),
    "hartmann6": (hartmann(_HARTMANN6), [(0.0, 1.0)] * 6),
    "levy4": (levy, [(-10.0, 10.0)] * 4),
    "rosenbrock4": (rosenbrock, [(-2.0, 2.0)] * 4),
}


@dataclass(frozen=True)
class Problem:
    """A function of the values of a space, and the target: what half of all random searches reach in 100 trials."""

    space: tuple[Dimension, ...]
    value: Callable[[Mapping[str, Any]], float]
    goal: float


def problem(name: str) -> Problem:
    """A function as a problem whose dimensions have no conditions."""
    function, ranges = FUNCTIONS[name]
    space = tuple(Dimension(f"x.{at}", "float", low, high) for at, (low, high) in enumerate(ranges))
    values = _random_values(name)
    return Problem(space, lambda x: function([x[each.key] for each in space]), _half_reach(values))


def conditional(name: str) -> Problem:
    """A function with a choice whose second value brings one more key, and a cost that grows with that key.

    At its largest the cost is half of what lies between the target and the median, so both choices reach the target.
    """
    function, ranges = FUNCTIONS[name]
    values = _random_values(name)
    cost = 0.5 * (float(np.median(values)) - _half_reach(values))
    plain = tuple(Dimension(f"x.{at}", "float", low, high) for at, (low, high) in enumerate(ranges))
    space = (
        *plain,
        Dimension("x.method", "choice", choices=("first", "second")),
        Dimension("x.second", "float", 0.0, 1.0, when={"x.method": ("second",)}),
    )
    half, shares = len(values) // 2, np.random.default_rng(1).random(len(values) // 2)
    goal = _half_reach(np.concatenate([values[:half], values[half:] + cost * shares]))
    return Problem(space, lambda x: function([x[each.key] for each in plain]) + cost * x.get("x.second", 0.0), goal)


def _random_values(name: str) -> NDArray[np.float64]:
    function, ranges = FUNCTIONS[name]
    low, high = np.array(ranges).T
    points = low + (high - low) * np.random.default_rng(0).random((200_000, len(ranges)))
    return np.array([function(point) for point in points])


def _half_reach(values: NDArray[np.float64]) -> float:
    return float(np.quantile(values, 1 - 0.5 ** (1 / RANDOM_TRIALS)))


def trials_to_target(problem: Problem, method: str, batch: int, seed: int) -> int:
    """Trials that have ended when the first one reaches the target; `batch` run at a time, and end in order of start.

    At most `MOST` are tried.
    """
    study = optuna.create_study(sampler=_sampler(method, problem.space, seed))
    running: list[tuple[Trial, float]] = []
    for ended in range(1, MOST + 1):
        while len(running) < batch:
            trial = study.ask()
            values = draw(problem.space, lambda dimension, trial=trial: suggest(trial, dimension))
            running.append((trial, problem.value(values)))
        trial, value = running.pop(0)
        if value <= problem.goal:
            return ended
        study.tell(trial, value, state=TrialState.COMPLETE)
    return MOST


def _sampler(method: str, space: tuple[Dimension, ...], seed: int) -> BaseSampler:
    if method == "optuna-tpe":
        return TPESampler(seed=seed, multivariate=True, constant_liar=True)
    if method == "optuna-gp":
        return GPSampler(seed=seed, warn_independent_sampling=False)
    settings = Study(run="function", sampler="random" if method == "random" else "gp", seed=seed)
    return NumberedSampler(lambda number: sampler(settings, space, number))


CASES = {
    "gp": ("gp", 1, problem),
    "gp-batch": ("gp", BATCH, problem),
    "gp-conditional": ("gp", BATCH, conditional),
    "random": ("random", BATCH, problem),
    "optuna-tpe": ("optuna-tpe", BATCH, problem),
    "optuna-gp": ("optuna-gp", BATCH, problem),
    "optuna-gp-conditional": ("optuna-gp", BATCH, conditional),
}
"""For each case the sampler, how many trials run at once, and what makes a problem of a function."""


def found(runs: Path, check: Callable[[], None], case: str) -> dict[str, list[int]]:
    """For each function the trials of all seeds, measured where they are missing."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna_warnings_off()
    method, batch, make = CASES[case]

    def measure(name: str) -> dict[str, Any]:
        made = make(name)
        return {"trials": [trials_to_target(made, method, batch, seed) for seed in range(SEEDS)]}

    return {
        name: stored(runs / f"{case}-{name}.json", check, lambda name=name: measure(name))["trials"]
        for name in FUNCTIONS
    }


def optuna_warnings_off() -> None:
    """Optuna says of some of its parts that they are experimental."""
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def ratio(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> Measured:
    """Geometric mean, over problems and seeds, of the trials of one over those of another."""
    logs = {name: float(np.mean(np.log(ours[name])) - np.mean(np.log(theirs[name]))) for name in ours}
    each = ", ".join(f"{name} {math.exp(value):.2f}" for name, value in logs.items())
    mean = float(np.mean(list(logs.values())))
    errors = [np.var(np.log(trials[name]), ddof=1) / SEEDS for trials in (ours, theirs) for name in ours]
    low, high = normal(mean, math.sqrt(sum(errors)) / len(ours))  # the functions are all there are, not a sample
    return Measured(math.exp(mean), each, (math.exp(low), math.exp(high)))


def rows(runs: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars."""

    def compared(ours: str, theirs: str) -> Callable[[Deadline], Measured]:
        return lambda _: ratio(found(runs, check, ours), found(runs, check, theirs))

    def with_conditions(plain: str, conditional: str) -> dict[str, list[int]]:
        behind = found(runs, check, conditional)
        return found(runs, check, plain) | {f"{name}, conditional": trials for name, trials in behind.items()}

    said = "six functions, 20 seeds, the target that half of all random searches reach in 100 trials"
    seeds = tuple(range(SEEDS))
    return [
        Bar(
            "tune.gp-batch",
            f"trials that the Gaussian process needs with eight running at once over those one at a time; {said}",
            "<=",
            1.6,
            compared("gp-batch", "gp"),
            seeds=seeds,
            kind="drawn",
        ),
        Bar(
            "tune.gp-random",
            f"trials that the Gaussian process needs with eight running at once over those of random search; {said}",
            "<=",
            0.6,
            compared("gp-batch", "random"),
            seeds=seeds,
            kind="drawn",
        ),
        Bar(
            "tune.gp-tpe",
            f"trials that the Gaussian process needs over those of Optuna's TPE, both with eight at once; {said}",
            "<=",
            1.0,
            compared("gp-batch", "optuna-tpe"),
            baseline="Optuna's TPE, multivariate, with the constant liar",
            seeds=seeds,
            peers=("optuna",),
            kind="drawn",
        ),
        Bar(
            "tune.gp-optuna-gp",
            f"trials that the Gaussian process needs over those of Optuna's GPSampler, both eight at once; {said}; "
            "each function also with a conditional key",
            "<=",
            1.0,
            lambda _: ratio(
                with_conditions("gp-batch", "gp-conditional"), with_conditions("optuna-gp", "optuna-gp-conditional")
            ),
            baseline="Optuna's GPSampler, one for the whole study, which draws the outcomes of running trials as well",
            seeds=seeds,
            peers=("optuna",),
            kind="drawn",
        ),
    ]
