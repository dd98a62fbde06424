"""Estimates a consensus from the labels of several raters, and detects raters who disagree with all others or copy.

No rater is judged by a consensus that contains the rater's own labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import combinations
from statistics import NormalDist

import numpy as np

from shoestring.core.errors import DataError

LOW_KAPPA = 0.2
"""A rater disagrees with all others if the 95% interval of the chance-corrected agreement with them lies below this."""
COPIED = 0.7
"""Minimum of `Likeness.copied` from which two raters count as copies of each other."""
AGREEING = 0.3
"""Minimum chance-corrected agreement of two raters on which a consensus can be based."""
SURE = 0.8
"""Minimum probability of the likeliest class of an item for its consensus to count as sure."""
ERROR = 0.01
"""Maximum probability that any pair in a set of independent raters is mistaken for copies."""
FEWEST = 10
"""Minimum number of items on which a rater is judged."""
SMOOTHING = 0.01
"""Count that is added to each entry of a confusion matrix, so that no label is impossible."""
ASKED = 10
"""Maximum number of raters whose labels are used to compare models; those with the most labels are used."""
GUESS_ROUNDS = 20
"""Number of iterations that estimate how many of a rater's right answers are guesses."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of raters, as three arrays of the same length; a rater labels an item at most once."""

    item: np.ndarray
    rater: np.ndarray
    label: np.ndarray
    items: int
    raters: int
    classes: int

    def __post_init__(self) -> None:
        for name, values, limit in (
            ("items", self.item, self.items),
            ("raters", self.rater, self.raters),
            ("labels", self.label, self.classes),
        ):
            if len(values) != len(self.item) or (len(values) and not 0 <= values.min() <= values.max() < limit):
                raise DataError(f"the {name} of the labels are not {len(self.item)} numbers from 0 to {limit - 1}")
        if len(np.unique(self.item.astype(np.int64) * self.raters + self.rater)) < len(self.item):
            raise DataError("a rater has labelled an item twice")

    @staticmethod
    def of_matrix(matrix: np.ndarray, classes: int) -> Labels:
        """Build labels from a table (items, raters), with -1 where a rater has not labelled an item."""
        item, rater = np.nonzero(matrix >= 0)
        return Labels(item, rater, matrix[item, rater].astype(np.int64), len(matrix), matrix.shape[1], classes)

    def only(self, chosen: np.ndarray) -> Labels:
        """Return the labels for which a mask is True; items, raters and classes keep their numbers."""
        return Labels(self.item[chosen], self.rater[chosen], self.label[chosen], self.items, self.raters, self.classes)

    def without(self, raters: Sequence[int]) -> Labels:
        """Return the labels of all raters except `raters`."""
        return self.only(~np.isin(self.rater, raters))

    @cached_property
    def counts(self) -> np.ndarray:
        """How often each item got each label, (items, classes)."""
        cells = self.item * self.classes + self.label
        return np.bincount(cells, minlength=self.items * self.classes).reshape(self.items, self.classes)

    @cached_property
    def of_rater(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The sorted items and the labels of each rater."""
        order = np.lexsort((self.item, self.rater))
        ends = np.searchsorted(self.rater[order], np.arange(1, self.raters))
        return list(zip(np.split(self.item[order], ends), np.split(self.label[order], ends), strict=True))


def votes(labels: Labels) -> np.ndarray:
    """Compute the share of each label among an item's labels, (items, classes); uniform for items without labels."""
    totals = labels.counts.sum(1, keepdims=True)
    return np.where(totals > 0, labels.counts / np.maximum(totals, 1), 1 / labels.classes)


def majority(labels: Labels, seed: int = 0) -> np.ndarray:
    """Return the most frequent label of each item; ties are broken at random."""
    return (labels.counts + 0.5 * np.random.default_rng(seed).random(labels.counts.shape)).argmax(1)


# -- consensus ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Consensus:
    """Estimates of a rater model about items and raters.

    `soft` holds the probabilities of the true class of each item, (items, classes); `confusion` the probabilities of
    each rater's labels given the true class, (raters, classes, labels); `shares` the frequencies of the classes.
    """

    soft: np.ndarray
    confusion: np.ndarray
    shares: np.ndarray
    rounds: int
    model: RaterModel


class RaterModel(StrEnum):
    """How a rater's labels depend on the true class."""

    CONFUSION = "a confusion matrix for each rater (Dawid and Skene)"
    """Labels depend on the class in any way (Dawid and Skene, 1979): some classes may be confused more than others."""
    GUESSES = "each rater knows the class or guesses (MACE)"
    """A rater knows the class with some probability, and otherwise guesses with probabilities that do not depend on it
    (Hovy, Berg-Kirkpatrick, Vaswani and Hovy, 2013)."""


def fit(
    labels: Labels,
    model: RaterModel = RaterModel.CONFUSION,
    *,
    start: np.ndarray | None = None,
    rounds: int = 200,
    tolerance: float = 1e-5,
) -> Consensus:
    """Estimate true classes and the raters' confusion matrices by expectation maximisation.

    A rater with few labels is treated as an average one. A confusion matrix has a prior of one label for each class,
    distributed like the labels of all raters; the probability that a rater knows the class has a prior of one label, at
    the average of all raters.

    Args:
        start: initial probabilities of the classes, (items, classes); defaults to the shares of votes.
        rounds: maximum number of iterations.
        tolerance: mean change of the probabilities below which the iterations end.
    """
    soft, number = votes(labels) if start is None else start, 0
    estimated = _confusions if model is RaterModel.CONFUSION else _guesses
    confusion, shares = estimated(_counts(labels, soft)), _shares(labels, soft)
    for _ in range(rounds):
        number += 1
        evidence = np.log(confusion)[labels.rater, :, labels.label]
        sums = [np.bincount(labels.item, evidence[:, true], labels.items) for true in range(labels.classes)]
        before, soft = soft, _normalised(np.log(shares) + np.stack(sums, 1))
        confusion, shares = estimated(_counts(labels, soft)), _shares(labels, soft)
        if np.abs(soft - before).mean() < tolerance:
            break
    return Consensus(soft, confusion, shares, number, model)


def _counts(labels: Labels, soft: np.ndarray) -> np.ndarray:
    """Return how often each rater gave each label to items of each class, (raters, classes, labels)."""
    cells, shape = labels.rater * labels.classes + labels.label, (labels.raters, labels.classes)
    sums = [np.bincount(cells, soft[labels.item, true], math.prod(shape)) for true in range(labels.classes)]
    return np.stack([one.reshape(shape) for one in sums], 1)


def _shares(labels: Labels, soft: np.ndarray) -> np.ndarray:
    """Return the shares of the classes among the items that have labels."""
    shares = soft[np.unique(labels.item)].sum(0) + SMOOTHING
    return shares / shares.sum()


def _confusions(counts: np.ndarray) -> np.ndarray:
    """Return confusion matrices as Dawid and Skene estimate them."""
    pooled = counts.sum(0) + SMOOTHING
    confusion = counts + pooled / pooled.sum(1, keepdims=True) + SMOOTHING
    return confusion / confusion.sum(2, keepdims=True)


def _guesses(counts: np.ndarray) -> np.ndarray:
    """Return confusion matrices of raters who know the class or guess, (raters, classes, labels)."""
    right, answers = np.diagonal(counts, axis1=1, axis2=2), counts.sum(1)
    knows, habits = np.full((len(counts), 1), 0.5), _proportions(answers + SMOOTHING)
    for _ in range(GUESS_ROUNDS):  # some of the right answers are guesses
        known = right * knows / (knows + (1 - knows) * habits)
        average = known.sum() / max(answers.sum(), 1)
        knows = (known.sum(1, keepdims=True) + average + SMOOTHING) / (
            answers.sum(1, keepdims=True) + 1 + 2 * SMOOTHING
        )
        habits = _proportions(answers - known + SMOOTHING)
    return (1 - knows)[:, :, None] * habits[:, None, :] + knows[:, :, None] * np.eye(counts.shape[1])


def _proportions(values: np.ndarray) -> np.ndarray:
    return values / values.sum(-1, keepdims=True)


def _normalised(logs: np.ndarray) -> np.ndarray:
    return _proportions(np.exp(logs - logs.max(1, keepdims=True)))


def of_others(labels: Labels, consensus: Consensus, rater: int) -> np.ndarray:
    """Estimate the true classes from the labels of all raters but one, (items, classes)."""
    items, own = labels.of_rater[rater]
    start = consensus.soft.copy()
    start[items] = _normalised(np.log(start[items] + 1e-12) - np.log(consensus.confusion[rater])[:, own].T)
    return fit(labels.without([rater]), consensus.model, start=start, rounds=10).soft


def consensus_of(labels: Labels) -> Consensus:
    """Estimate true classes with the rater model that predicts the labels of held-out raters better.

    At most `ASKED` raters are held out in turn: each model's consensus of the other raters is compared with the labels
    of the held-out one. Confusion matrices win where raters confuse particular classes, but not where labels are few or
    all raters find the same items hard.
    """
    models = RaterModel.CONFUSION, RaterModel.GUESSES
    asked = sorted(range(labels.raters), key=lambda rater: -len(labels.of_rater[rater][0]))[:ASKED]
    ahead = 0
    for rater in asked:
        items, own = labels.of_rater[rater]
        shared = labels.counts[items].sum(1) > 1
        if shared.any():
            others = labels.without([rater])  # no `start`: one that has seen the rater favours more parameters
            told = (fit(others, model, rounds=20).soft[items[shared]].argmax(1) for model in models)
            more, fewer = (int((one == own[shared]).sum()) for one in told)
            ahead += more - fewer
    return fit(labels, models[ahead <= 0])


# -- raters ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """How well a rater agrees with the consensus of the other raters.

    `kappa` is the chance-corrected agreement, with its 95% interval from `low` to `high`, all NaN if undefined; `note`
    is empty, or says what is wrong with the rater.
    """

    rater: int
    labels: int
    kappa: float
    low: float
    high: float
    note: str = ""


def judge(labels: Labels, consensus: Consensus, rater: int) -> Judgement:
    """Judge a rater by the consensus of the others, on the items that others have labelled too."""
    items, own = labels.of_rater[rater]
    shared = labels.counts[items].sum(1) > 1
    number = int(shared.sum())
    present = sum(len(there) > 0 for there, _ in labels.of_rater)
    if number < FEWEST or present < 3:
        reason = "too few labels to judge" if number < FEWEST else "two raters cannot be told apart"
        return Judgement(rater, len(items), math.nan, math.nan, math.nan, reason)
    others = of_others(labels, consensus, rater)[items[shared]]
    answers = np.bincount(own[shared], minlength=labels.classes) / number
    observed = float(others[np.arange(number), own[shared]].mean())
    expected = float(others.mean(0) @ answers)
    if expected > 1 - 1e-9:
        return Judgement(rater, len(items), math.nan, math.nan, math.nan, "everybody gives one label")
    kappa = (observed - expected) / (1 - expected)
    reach = 1.96 * math.sqrt(observed * (1 - observed) / number) / (1 - expected)
    note = "disagrees with all others" if kappa + reach < LOW_KAPPA else ""
    return Judgement(rater, len(items), kappa, kappa - reach, kappa + reach, note)


@dataclass(frozen=True)
class Likeness:
    """Agreement of two raters beyond what the other raters' labels explain.

    `copied` is the share of answers that would have to be copied for the raters to agree as often, at most 1;
    `deviations` is the number of standard deviations by which the raters agree more often than by chance among items
    with a similar consensus.
    """

    first: int
    second: int
    copied: float
    deviations: float


def likeness(labels: Labels, first: int, second: int, *, by_others: bool = True) -> Likeness:
    """Measure how much more two raters agree than the labels of the others explain.

    The items are grouped into cells by the consensus of the others: its two most probable classes, and the probability
    of the first. Within a cell, independent raters agree as if one rater's labels were shuffled. Items on which the
    others are not sure are left out, because two raters who know the truth agree on them without copying.

    Args:
        by_others: whether to discount agreement that the others' labels explain; otherwise only chance is discounted.
    """
    (items, labels_first), (others, labels_second) = labels.of_rater[first], labels.of_rater[second]
    both, at, place = np.intersect1d(items, others, assume_unique=True, return_indices=True)
    answers = np.stack([labels_first[at], labels_second[place]])
    cell = np.zeros(len(both), np.int64)
    if by_others:
        soft = fit(labels.without([first, second]), rounds=20).soft[both]
        sure = soft.max(1) >= SURE
        soft, answers = soft[sure], answers[:, sure]
        order = np.argsort(-soft, 1, kind="stable")[:, :2]
        columns = np.column_stack([order, np.digitize(soft.max(1), (0.9, 0.99))])
        cell = np.unique(columns, axis=0, return_inverse=True)[1].ravel()
    copied, deviations = _excess(cell, answers, labels.classes) if len(cell) >= FEWEST else (0.0, 0.0)
    return Likeness(first, second, copied, deviations)


def _excess(cell: np.ndarray, answers: np.ndarray, classes: int) -> tuple[float, float]:
    """Return the share of copied answers and the deviations of `Likeness`, given each item's cell."""
    cells = int(cell.max()) + 1 if len(cell) else 0
    first, second = (
        np.bincount(cell * classes + row, minlength=cells * classes).reshape(cells, classes).astype(np.float64)
        for row in answers
    )
    agreed = np.bincount(cell, answers[0] == answers[1], cells)
    sizes = first.sum(1)
    large = sizes > 1
    first, second, agreed, sizes = first[large], second[large], agreed[large], sizes[large]
    products = first * second
    crossed = products.sum(1)
    expected = (crossed - agreed) / (sizes - 1)  # pairs of different items only
    shuffled = crossed / sizes
    spread = (crossed - (products * (first + second)).sum(1) / sizes + shuffled**2) / (sizes - 1)
    deviation = math.sqrt(max(float(spread.sum()), 0.0))
    room = float((sizes - expected).sum())
    if deviation < 1e-9 or room < 1e-9:  # at least one rater always gives the same label
        return 0.0, 0.0
    return float((agreed - expected).sum()) / room, float((agreed - shuffled).sum()) / deviation


def copies(labels: Labels) -> list[list[int]]:
    """Find groups of raters who copy each other.

    The pair with the largest share of copied answers is merged into one rater, and all pairs are measured again, until
    no pair reaches `COPIED` significantly. A pair is only judged if two other raters agree with each other.
    """
    groups = {rater: [rater] for rater, (items, _) in enumerate(labels.of_rater) if len(items) >= FEWEST}
    least = NormalDist().inv_cdf(1 - ERROR / max(len(groups) * (len(groups) - 1) // 2, 1))
    while alike := _alike(labels, sorted(groups), least):
        most = max(alike, key=lambda pair: (pair.copied, pair.deviations))
        former, latter = sorted((most.first, most.second))
        groups[former] = sorted(groups[former] + groups.pop(latter))
        labels = labels.without([latter])
    return [group for group in groups.values() if len(group) > 1]


def _alike(labels: Labels, raters: Sequence[int], least: float) -> list[Likeness]:
    """Return the pairs of raters whose agreement reaches `COPIED` and has at least `least` deviations."""
    pairs = [likeness(labels, *pair, by_others=False) for pair in combinations(raters, 2)]
    agreeing = [{pair.first, pair.second} for pair in pairs if pair.copied >= AGREEING]
    often = [pair for pair in pairs if pair.copied >= COPIED]  # the others' labels can only lower `copied`
    judged = [
        likeness(labels, pair.first, pair.second)
        for pair in often
        if any(others.isdisjoint((pair.first, pair.second)) for others in agreeing)
    ]
    return [pair for pair in judged if pair.copied >= COPIED and pair.deviations >= least]


@dataclass(frozen=True, eq=False)
class Review:
    """Judgements of all raters, and the consensus of the raters that count.

    `groups` holds groups of raters who copy each other; one rater of a group counts, or none. `judgements` has an entry
    for each rater.
    """

    groups: list[list[int]]
    judgements: list[Judgement]
    consensus: Consensus


def review(labels: Labels, *, merge: bool = True) -> Review:
    """Find copies, judge all raters, and estimate the true classes.

    Raters who disagree with all others are reported but not left out: their confusion matrices weight them.

    Args:
        merge: whether the first member of a group of raters who copy each other counts; otherwise none does.
    """
    groups = copies(labels)
    out = {rater for group in groups for rater in (group[1:] if merge else group)}
    counted = labels.without(sorted(out))
    consensus = consensus_of(counted)
    judgements = []
    for rater in range(labels.raters):
        alike = next((group for group in groups if rater in group), [rater])
        if rater in out:  # judged in place of the whole group
            sole = labels.without(sorted(out.union(alike) - {rater}))
            judged = judge(sole, fit(sole, consensus.model), rater)
        else:
            judged = judge(counted, consensus, rater)
        if len(alike) > 1:
            judged = replace(judged, note=f"copies or is copied: group of {len(alike)} raters")
        judgements.append(judged)
    return Review(groups, judgements, consensus)
