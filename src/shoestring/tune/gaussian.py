"""Bayesian optimization by a Gaussian process with expected improvement, which takes running trials into account.

The kernel is Matern 5/2 with a length scale per dimension, fitted by maximum a posteriori. The outcomes of running
trials are drawn jointly from the posterior ("fantasies"), and the improvement is averaged over the draws (Snoek et al.,
2012, section 3.2, https://arxiv.org/abs/1206.2944), so parallel trials spread out without waiting for each other's
results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState
from scipy import linalg, optimize, stats

from shoestring.tune.distributions import distribution, from_optuna, to_optuna
from shoestring.tune.space import Dimension

Array = NDArray[np.float64]

FANTASIES, CANDIDATES, STARTS, ROUNDS = 24, 1024, 8, 6
_JITTER = 1e-8  # added to the kernel's diagonal, so that rounding does not make the Cholesky decomposition fail


class GaussianSampler(BaseSampler):
    """An Optuna sampler that proposes values by a Gaussian process; conditional dimensions are sampled at random.

    Args:
        seed: seed of the sampler's random numbers.
        sequence: seed of the Sobol sequence that provides the values of the first trials.
    """

    def __init__(self, space: Sequence[Dimension], *, seed: int, sequence: int = 0) -> None:
        self.space = [dimension for dimension in space if not dimension.when]
        self.sequence, self.random = sequence, np.random.default_rng(seed)
        self._independent = RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {dimension.key: distribution(dimension) for dimension in self.space}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not self.space:
            return {}
        keys = [dimension.key for dimension in self.space]
        others = [other for other in study.get_trials(deepcopy=False) if set(keys) <= set(other.params)]
        done = [other for other in others if other.state == TrialState.COMPLETE]
        if len(done) < max(4, 2 * len(keys)):
            sobol = stats.qmc.Sobol(width(self.space), rng=np.random.default_rng(self.sequence))
            number = int(trial.number)
            # a Sobol sequence is balanced only if the number of its points is a power of two
            return to_optuna(self.space, decode(self.space, sobol.random(2 ** number.bit_length())[number]))
        sign = 1.0 if study.direction.name == "MINIMIZE" else -1.0
        values = [sign * float(other.value or 0.0) for other in done]
        failed = [other for other in others if other.state == TrialState.FAIL]
        values += [max(values)] * len(failed)  # failed trials count as the worst result
        seen = np.array([encode(self.space, from_optuna(self.space, other.params)) for other in (*done, *failed)])
        running = [other for other in others if other.state == TrialState.RUNNING and other.number != trial.number]
        pending = np.array([encode(self.space, from_optuna(self.space, other.params)) for other in running]).reshape(
            -1, seen.shape[1]
        )
        return to_optuna(self.space, propose(self.space, seen, np.array(values), pending, self.random))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)


# -- points in the unit cube ------------------------------------------------------------------------------------------


def width(space: Sequence[Dimension]) -> int:
    """Number of coordinates of an encoded point of a space."""
    return sum(len(dimension.choices) or 1 for dimension in space)


def encode(space: Sequence[Dimension], values: Mapping[str, Any]) -> Array:
    """Encode values as a point in the unit cube; a choice is encoded one-hot, with one coordinate per option."""
    point: list[float] = []
    for dimension in space:
        value = values[dimension.key]
        if dimension.kind == "choice":
            chosen = dimension.index(value)
            point += [float(at == chosen) for at in range(len(dimension.choices))]
        elif dimension.kind == "log":
            point.append(float(np.log(value / dimension.low) / np.log(dimension.high / dimension.low)))
        else:
            point.append((value - dimension.low) / (dimension.high - dimension.low))
    return np.array(point)


def decode(space: Sequence[Dimension], point: Array) -> dict[str, Any]:
    """Decode a point to values: integers are rounded, and a choice becomes the option with the largest coordinate."""
    values: dict[str, Any] = {}
    at = 0
    for dimension in space:
        size = len(dimension.choices) or 1
        part, at = point[at : at + size], at + size
        low, high, share = dimension.low, dimension.high, float(np.clip(part[0], 0, 1))
        if dimension.kind == "choice":
            values[dimension.key] = dimension.choices[int(np.argmax(part))]
        elif dimension.kind == "int":
            values[dimension.key] = round(low + share * (high - low))
        else:
            log = dimension.kind == "log"
            value = low * (high / low) ** share if log else low + share * (high - low)
            values[dimension.key] = min(max(value, low), high)
    return values


# -- the process ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A Gaussian process fitted to data: `points` (n, d), and `values` (n,) with mean about 0 and variance about 1."""

    points: Array
    values: Array
    scales: Array
    """Length scales (d,)."""
    noise: float

    @property
    def _root(self) -> Array:
        gram = matern(self.points, self.points, self.scales)
        return linalg.cholesky(gram + (self.noise + _JITTER) * np.eye(len(gram)), lower=True)

    def at(self, points: Array) -> tuple[Array, Array]:
        """Posterior mean (m,) and covariance (m, m) at points (m, d)."""
        root, cross = self._root, matern(self.points, points, self.scales)
        solved = linalg.solve_triangular(root, cross, lower=True)
        whitened = linalg.solve_triangular(root, self.values, lower=True)
        return solved.T @ whitened, matern(points, points, self.scales) - solved.T @ solved

    def marginal(self, points: Array) -> tuple[Array, Array]:
        """Posterior mean (m,) and standard deviation (m,) at points (m, d)."""
        root, cross = self._root, matern(self.points, points, self.scales)
        solved = linalg.solve_triangular(root, cross, lower=True)
        mean = solved.T @ linalg.solve_triangular(root, self.values, lower=True)
        return mean, np.sqrt(np.maximum(1.0 - np.sum(solved**2, axis=0), 1e-12))

    def extended(self, points: Array) -> Process:
        """Condition the process on its own posterior means at points (m, d), as if these means had been observed."""
        mean = self.marginal(points)[0]
        data = np.concatenate([self.points, points]), np.concatenate([self.values, mean])
        return Process(*data, self.scales, self.noise)

    def improvement(self, points: Array, outcomes: Array) -> Array:
        """Expected improvement at points (m, d), averaged over the fantasies in `outcomes` (n, fantasies).

        A floor on the variance keeps the improvement above 0 everywhere, so there is no need to maximize its logarithm
        instead.
        """
        root, cross = self._root, matern(self.points, points, self.scales)
        solved = linalg.solve_triangular(root, cross, lower=True)
        mean = solved.T @ linalg.solve_triangular(root, outcomes, lower=True)
        deviation = np.sqrt(np.maximum(1.0 - np.sum(solved**2, axis=0), 1e-12))[:, None]
        gap = (outcomes.min(axis=0) - mean) / deviation
        return np.mean(deviation * (gap * stats.norm.cdf(gap) + stats.norm.pdf(gap)), axis=1)


def matern(left: Array, right: Array, scales: Array) -> Array:
    """Matern 5/2 kernel (n, m) between points (n, d) and points (m, d)."""
    distance = np.sqrt(5) * np.sqrt(np.sum(((left[:, None] - right[None]) / scales) ** 2, axis=2))
    return (1 + distance + distance**2 / 3) * np.exp(-distance)


def fit(points: Array, values: Array) -> Process:
    """Fit length scales and noise by maximum a posteriori.

    The priors are log-normal. The median for length scales is 0.5 sqrt(d), because distances in the unit cube grow with
    sqrt(d); the median for the noise is 1e-4.
    """
    width = points.shape[1]
    middle = np.append(np.full(width, np.log(0.5 * np.sqrt(width))), np.log(1e-4))
    spread = np.append(np.full(width, 1.0), 2.0)
    squares = (points[:, None] - points[None]) ** 2

    def negative(chosen: Array) -> tuple[float, Array]:
        """Negative log posterior, and its gradient with respect to the logarithms of the scales and the noise."""
        scales, noise = np.exp(chosen[:-1]), np.exp(chosen[-1])
        scaled = np.sqrt(5 * np.sum(squares / scales**2, axis=2))
        decay = np.exp(-scaled)
        gram = (1 + scaled + scaled**2 / 3) * decay + (noise + _JITTER) * np.eye(len(points))
        root = linalg.cholesky(gram, lower=True)
        weights = linalg.cho_solve((root, True), values)
        inverse = linalg.cho_solve((root, True), np.eye(len(points)))
        inner = np.outer(weights, weights) - inverse
        # slope * squares / scales**2 is the derivative of the kernel with respect to the logarithm of a length scale
        slope = (5 / 3) * (1 + scaled) * decay
        gradient = [0.5 * np.sum(inner * slope * squares[:, :, i] / scales[i] ** 2) for i in range(width)]
        gradient.append(0.5 * noise * np.trace(inner))
        away = (chosen - middle) / spread
        loss = 0.5 * values @ weights + np.sum(np.log(np.diag(root))) + 0.5 * away @ away
        return float(loss), -np.array(gradient) + away / spread

    bounds = [(np.log(0.02), np.log(20.0))] * width + [(np.log(1e-7), np.log(0.5))]
    best = optimize.minimize(negative, middle, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60}).x
    return Process(points, values, np.exp(best[:-1]), float(np.exp(best[-1])))


def propose(
    space: Sequence[Dimension], seen: Array, values: Array, pending: Array, random: np.random.Generator
) -> dict[str, Any]:
    """Find the values in the space with the largest expected improvement over the smallest outcome.

    Args:
        seen: encoded points (n, d) with known outcomes.
        values: outcomes (n,) of the points in `seen`; smaller is better.
        pending: encoded points (m, d) of running trials.
    """
    centred = (values - values.mean()) / (values.std() or 1.0)
    process = fit(seen, centred)
    outcomes = np.repeat(centred[:, None], FANTASIES if len(pending) else 1, axis=1)
    if len(pending):
        mean, covariance = process.at(pending)
        root = linalg.cholesky(covariance + 1e-6 * np.eye(len(mean)), lower=True)
        drawn = mean[:, None] + root @ random.standard_normal((len(mean), FANTASIES))
        outcomes = np.concatenate([outcomes, drawn])
        process = Process(
            np.concatenate([seen, pending]), np.concatenate([centred, mean]), process.scales, process.noise
        )
    starts = seen[np.argsort(values)[:STARTS]]
    return decode(space, maximize(space, lambda points: process.improvement(points, outcomes), starts, random))


def maximize(
    space: Sequence[Dimension], score: Callable[[Array], Array], starts: Array, random: np.random.Generator
) -> Array:
    """Search for the point (d,) in the unit cube with the largest score, among points that encode values of the space.

    Args:
        score: maps points (m, d) to their scores (m,).
        starts: points (n, d) whose neighbourhoods are searched, in addition to random points.
    """
    near = np.repeat(starts, max(1, CANDIDATES // (4 * len(starts))), axis=0)
    points = np.concatenate([
        random.random((CANDIDATES, near.shape[1])), near + 0.05 * random.standard_normal(near.shape)
    ])  # fmt: skip
    spread, winner = 0.1, points[0]
    for _ in range(ROUNDS):  # first around random points and `starts`, then ever closer to the best points
        points = np.array([encode(space, decode(space, point)) for point in points])
        scores = score(points)
        top = points[np.argsort(-scores)[:STARTS]]
        winner = points[int(np.argmax(scores))]
        moved = np.repeat(top, 24, axis=0)
        points = np.concatenate([top, moved + spread * random.standard_normal(moved.shape)])
        spread *= 0.4
    return winner
