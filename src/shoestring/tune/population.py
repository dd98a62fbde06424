"""Population based training (PBT, https://arxiv.org/abs/1711.09846) and PB2 (https://arxiv.org/abs/2002.02518).

Members pause at the same steps. One that is among the worst there ends, and a fork takes its place: a new trial that
begins from the checkpoint of one of the best, with other settings. Nobody waits: a member is compared with those that
were at this step before, and the one that is furthest behind continues first, so that most of them were.
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
"""For each trial, by its number, the objective at each comparison that it reached; smaller is better."""


@dataclass(frozen=True)
class Fork:
    """A member to end, and the one whose checkpoint of the same comparison its successor begins from."""

    ended: TrialLease
    parent: TrialLease


def scores_of(
    trials: Sequence[TrialLease], reports: Mapping[int, Mapping[int, float]], population: Population, sign: int
) -> dict[int, dict[int, float]]:
    """The objective of each trial at the comparisons that it reached itself, which for a fork begin after its first
    step. A value that is not finite counts as infinitely bad.

    Args:
        reports: what each trial has reported, by its id and by step. sign: -1 where the objective is to be large.
    """
    found: dict[int, dict[int, float]] = {}
    for trial in trials:
        found[trial.number] = {}
        values, rung = reports[trial.trial], trial.forked
        while later := [at for at in values if at >= population.step(rung)]:
            value = sign * values[min(later)]
            found[trial.number][rung] = value if math.isfinite(value) else math.inf
            rung += 1
    return found


def next_move(
    trials: Sequence[TrialLease], scores: Scores, population: Population, random: np.random.Generator
) -> TrialLease | Fork | None:
    """What the member that is furthest behind does: continue, or make room for a fork; None where none is paused."""
    paused = [trial for trial in trials if trial.state == "paused"]
    if not paused:
        return None
    member = min(paused, key=lambda trial: (trial.rung, trial.number))
    rung = member.rung
    at_rung = {trial.number: trial for trial in trials if rung in scores[trial.number]}
    ranked = sorted(at_rung, key=lambda number: (scores[number][rung], number))
    count = max(1, round(population.share * len(ranked)))
    if 2 * count > len(ranked) or 2 * len(ranked) < population.size or member.number not in ranked[-count:]:
        return member
    best = [
        number
        for number in ranked[:count]
        if math.isfinite(scores[number][rung]) and _has_paused(at_rung[number], rung)
    ]
    return Fork(member, at_rung[int(random.choice(best))]) if best else member


def _has_paused(trial: TrialLease, rung: int) -> bool:
    """Whether it has paused at a comparison and so has a checkpoint of it: a fast one may end before it is asked to."""
    return trial.rung > rung or trial.state in ("paused", "pruned")


# -- other settings ---------------------------------------------------------------------------------------------------


def perturb(
    space: Sequence[Dimension], values: Mapping[str, Any], population: Population, random: np.random.Generator
) -> dict[str, Any]:
    """PBT: each number is multiplied by 0.8 or 1.2, each choice moves to a neighbour, or either is drawn anew."""
    changed: dict[str, Any] = {}
    for dimension in space:
        if not dimension.applies(changed):
            continue
        value = values.get(dimension.key)
        if value is None or random.random() < population.resample:
            width = len(dimension.choices) or 1
            changed |= decode([dimension], random.random(width))
        elif dimension.choices:
            at = dimension.choices.index(value) + int(random.choice([-1, 1]))
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
    """PB2: the numbers whose upper confidence bound of the improvement until the next comparison is largest.

    The Gaussian process has the comparison as one more dimension, so that what was learned long ago fades at a rate
    that is fitted (the paper fixes the form of the decay). Intervals that still run count with their expected outcome,
    so forks of the same time differ. Choices, and keys with conditions, change as under PBT.
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
    running = [each for each in trials if each.state in ("held", "ready") and each.number in scores]
    pending = [[now, *encode(numbers, each.parameters)] for each in running]
    if pending:
        process = process.extended(np.array(pending))
    weight = math.sqrt(0.2 + math.log(1 + 0.4 * (rung + 1)))

    def bound(candidates: Array) -> Array:
        mean, deviation = process.marginal(np.column_stack([np.full(len(candidates), now), candidates]))
        return mean + weight * deviation

    return changed | decode(numbers, maximize(numbers, bound, encode(numbers, values)[None], random))


def _intervals(
    space: Sequence[Dimension], trials: Sequence[TrialLease], scores: Scores, population: Population
) -> tuple[Array, Array]:
    """For each interval between two comparisons: its end and its settings (n, 1 + d), and by how much the objective
    fell (n,)."""
    points, gains = [], []
    by_number = {trial.number: trial for trial in trials}
    for trial in trials:
        for rung, score in scores[trial.number].items():
            source = trial.number if rung > trial.forked else trial.parent
            before = scores.get(source, {}).get(rung - 1, math.inf) if source in by_number else math.inf
            if math.isfinite(before) and math.isfinite(score):
                points.append([population.time(rung), *encode(space, trial.parameters)])
                gains.append(before - score)
    return np.array(points).reshape(-1, 1 + sum(len(each.choices) or 1 for each in space)), np.array(gains)
