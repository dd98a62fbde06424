"""Population based training (PBT, https://arxiv.org/abs/1711.09846) and PB2 (https://arxiv.org/abs/2002.02518).

All members of a population pause at the same steps to be compared. A member that is among the worst at a step ends. A
fork replaces the ended member: a new trial that begins from the checkpoint of one of the best members, with other
settings. Members do not wait for each other: a member is compared with the members that have already reached the same
step. The member that is furthest behind is compared first, when most other members have reached its step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoestring.tune.gaussian import Array, decode, encode, fit, maximize
from shoestring.tune.settings import Population
from shoestring.tune.space import Dimension
from shoestring.tune.store import TrialLease

Scores = Mapping[int, Mapping[int, float]]
"""Number of a trial -> number of a round of comparisons -> the trial's objective then; smaller is better."""


@dataclass(frozen=True)
class Fork:
    """The replacement of a member by a fork, which begins at the parent's checkpoint of the current comparison."""

    ended: TrialLease
    parent: TrialLease


def scores_of(
    trials: Sequence[TrialLease], reports: Mapping[int, Mapping[int, float]], population: Population, sign: int
) -> dict[int, dict[int, float]]:
    """Find each trial's objective at every comparison that the trial itself, rather than its parent, has reached.

    A value that is not finite counts as infinitely bad.

    Args:
        reports: maps a trial's id and a step to the reported value.
        sign: 1 to minimize the objective, -1 to maximize it.
    """
    scores: dict[int, dict[int, float]] = {}
    for trial in trials:
        scores[trial.number] = {}
        values, rung = reports[trial.trial], trial.forked
        while later := [at for at in values if at >= population.step(rung)]:
            value = sign * values[min(later)]
            scores[trial.number][rung] = value if math.isfinite(value) else math.inf
            rung += 1
    return scores


def next_move(
    trials: Sequence[TrialLease], scores: Scores, population: Population, random: np.random.Generator
) -> TrialLease | Fork | None:
    """Decide about the paused member that is furthest behind: it continues, or a `Fork` replaces it.

    Returns None if no member is paused.
    """
    paused = [trial for trial in trials if trial.state == "paused"]
    if not paused:
        return None
    member = min(paused, key=lambda trial: (trial.rung, trial.number))
    rung = member.rung
    at_rung = {trial.number: trial for trial in trials if rung in scores[trial.number]}
    ranked = sorted(at_rung, key=lambda number: (scores[number][rung], number))
    count = max(1, round(population.truncation * len(ranked)))
    if 2 * count > len(ranked) or 2 * len(ranked) < population.size or member.number not in ranked[-count:]:
        return member
    best = []
    for number in ranked[:count]:
        # only a trial that paused here has a checkpoint of this comparison; a fast trial may end before it is asked to
        # pause
        has_paused = at_rung[number].rung > rung or at_rung[number].state in ("paused", "pruned")
        if has_paused and math.isfinite(scores[number][rung]):
            best.append(number)
    return Fork(member, at_rung[int(random.choice(best))]) if best else member


# -- other settings ---------------------------------------------------------------------------------------------------


def perturb(
    space: Sequence[Dimension], values: Mapping[str, Any], population: Population, random: np.random.Generator
) -> dict[str, Any]:
    """Change settings as in PBT: multiply by 0.8 or 1.2, move a choice to an adjacent option, or draw a new value."""
    changed: dict[str, Any] = {}
    for dimension in space:
        if not dimension.applies(changed):
            continue
        value = values.get(dimension.key)
        if value is None or random.random() < population.resample:
            width = len(dimension.choices) or 1
            changed |= decode([dimension], random.random(width))
        elif dimension.choices:
            at = dimension.index(value) + int(random.choice([-1, 1]))
            changed[dimension.key] = dimension.choices[min(max(at, 0), len(dimension.choices) - 1)]
        else:
            moved = min(max(value * random.choice([0.8, 1.2]), dimension.low), dimension.high)
            changed[dimension.key] = round(moved) if dimension.kind == "int" else float(moved)
    return changed


def bandit(
    space: Sequence[Dimension],
    values: Mapping[str, Any],
    trials: Sequence[TrialLease],
    scores: Scores,
    rung: int,
    population: Population,
    random: np.random.Generator,
) -> dict[str, Any]:
    """Choose settings as in PB2: by the largest upper confidence bound on the improvement until the next comparison.

    The Gaussian process has time as an additional dimension, so old results lose weight at a fitted rate; in the paper,
    the decay has a fixed form instead. Running trials are included with their expected outcomes, so that simultaneous
    forks differ. Choices and conditional keys are changed as in PBT.
    """
    numbers = [dimension for dimension in space if not dimension.choices and not dimension.when]
    changed = perturb([dimension for dimension in space if dimension not in numbers], values, population, random)
    points, gains = _intervals(numbers, trials, scores, population)
    if not numbers or len(gains) < 4:
        return perturb(space, values, population, random)
    latest = max(float(points[:, 0].max()), population.time(rung + 1))
    points[:, 0] /= latest
    now = population.time(rung + 1) / latest
    gains = (gains - gains.mean()) / (gains.std() or 1.0)
    process = fit(points, gains)
    running = [trial for trial in trials if trial.state in ("held", "ready") and trial.number in scores]
    pending = [[now, *encode(numbers, trial.parameters)] for trial in running]
    if pending:
        process = process.extended(np.array(pending))
    # the weight of exploration grows with the logarithm of time, as in GP-UCB (https://arxiv.org/abs/0912.3995)
    weight = math.sqrt(0.2 + math.log(1 + 0.4 * (rung + 1)))

    def bound(candidates: Array) -> Array:
        mean, deviation = process.marginal(np.column_stack([np.full(len(candidates), now), candidates]))
        return mean + weight * deviation

    return changed | decode(numbers, maximize(numbers, bound, encode(numbers, values)[None], random))


def _intervals(
    space: Sequence[Dimension], trials: Sequence[TrialLease], scores: Scores, population: Population
) -> tuple[Array, Array]:
    """Collect the data for the Gaussian process: for each of the n intervals between two comparisons, the end time and
    the settings (n, 1 + d), and the decrease of the objective (n,)."""
    points, gains = [], []
    by_number = {trial.number: trial for trial in trials}
    for trial in trials:
        for rung, score in scores[trial.number].items():
            source = trial.number if rung > trial.forked else trial.parent
            before = scores.get(source, {}).get(rung - 1, math.inf) if source in by_number else math.inf
            if math.isfinite(before) and math.isfinite(score):
                points.append([population.time(rung), *encode(space, trial.parameters)])
                gains.append(before - score)
    return np.array(points).reshape(-1, 1 + sum(len(dimension.choices) or 1 for dimension in space)), np.array(gains)
