"""Agreement of raters against published values, a direct computation and scikit-learn, and raters with known faults."""

import itertools
import math

import numpy as np
import pytest

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.annotation.agreement import (
    LEVELS,
    alpha,
    bootstrap,
    cohen,
    described,
    fleiss,
    krippendorff,
    tally,
)
from shoestring_recipes.annotation.raters import (
    Labels,
    RaterModel,
    consensus_of,
    copies,
    fit,
    likeness,
    majority,
    review,
    votes,
)

N = math.nan
TWELVE = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, N, N, N],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, N, 3],
        [N, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, N],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, N],
    ]
).T
"""Krippendorff's example of four observers of twelve units (Computing Krippendorff's alpha-reliability, 2011)."""
FLEISS = np.array(
    [
        [0, 0, 0, 0, 14],
        [0, 2, 6, 4, 2],
        [0, 0, 3, 5, 6],
        [0, 3, 9, 2, 0],
        [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0],
        [3, 2, 6, 3, 0],
        [2, 5, 3, 2, 2],
        [6, 5, 2, 1, 0],
        [0, 2, 2, 3, 7],
    ]
)
"""Ten subjects in five categories by fourteen raters, whose kappa is published as 0.210."""


def directly(ratings, level):
    """Alpha by its definition, pair by pair."""
    units = [[value for value in row if not math.isnan(value)] for row in ratings]
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]

    def differ(one, other):
        low, high = sorted((one, other))
        if level == "nominal":
            return float(one != other)
        if level == "interval":
            return (one - other) ** 2
        if level == "ratio":
            return ((one - other) / (one + other)) ** 2 if one + other else 0.0
        between = sum(low <= value <= high for value in values)
        return (between - (values.count(low) + values.count(high)) / 2) ** 2 if one != other else 0.0

    observed = sum(
        differ(one, other) / (len(unit) - 1) for unit in units for one, other in itertools.permutations(unit, 2)
    )
    expected = sum(differ(one, other) for one, other in itertools.permutations(values, 2))
    return 1 - (len(values) - 1) * observed / expected if expected else N


def random_table(rng):
    table = rng.integers(0, rng.integers(2, 6), (rng.integers(2, 12), rng.integers(2, 6))).astype(float)
    table[rng.random(table.shape) < 0.3] = N
    return table


def test_alpha_is_as_published_and_by_definition():
    published = {"nominal": 0.743, "ordinal": 0.815, "interval": 0.849, "ratio": 0.797}
    assert {level: round(krippendorff(TWELVE, level), 3) for level in LEVELS} == published
    rng, undefined = np.random.default_rng(0), 0
    for table in (random_table(rng) for _ in range(25)):
        for level in LEVELS:
            ours, theirs = krippendorff(table, level), directly(table, level)
            assert ours == pytest.approx(theirs, abs=1e-9, nan_ok=True), (table, level)
            undefined += math.isnan(ours)
    assert undefined > 0


def test_alpha_equals_the_oracle():
    oracle = pytest.importorskip("krippendorff")  # GPL: for this test only
    rng = np.random.default_rng(1)
    for table in (random_table(rng) for _ in range(100)):
        for level in LEVELS:
            ours = krippendorff(table, level)
            if not math.isnan(ours):
                theirs = oracle.alpha(reliability_data=table.T, level_of_measurement=level)
                assert ours == pytest.approx(theirs, abs=1e-9)


def test_one_value_or_no_pair_is_undefined():
    for table in ([[1, 1], [1, 1]], [[1, N], [N, 2]], [[N, N]], np.empty((0, 3)), np.empty((3, 0))):
        for level in LEVELS:
            assert math.isnan(krippendorff(np.array(table, float), level)), (table, level)
    assert math.isnan(fleiss(np.array([[3, 0], [3, 0]]))) and math.isnan(fleiss(np.empty((0, 2))))
    assert math.isnan(cohen(np.array([[1, 1], [1, 1]]))) and math.isnan(cohen(np.array([[1, N], [N, 2]])))
    assert described(N) == "undefined" and described(0.5, (N, N)) == "0.500"
    assert all(map(math.isnan, bootstrap(lambda rows: N, np.ones((3, 2)), 20)))


def test_kappas_are_as_published_and_as_scikit_learn_has_them():
    metrics = pytest.importorskip("sklearn.metrics")
    assert round(fleiss(FLEISS), 3) == 0.210
    rng = np.random.default_rng(2)
    for number in range(30):
        pairs = rng.integers(0, 4, (20, 2)).astype(float)
        pairs[:4] = np.arange(4)[:, None]  # all classes, as scikit-learn weighs classes by their place
        for weights in ("", "linear", "quadratic"):
            theirs = metrics.cohen_kappa_score(*pairs.T, weights=weights or None)
            assert cohen(pairs, weights) == pytest.approx(theirs, abs=1e-12), number
    assert cohen(np.vstack([pairs, [[1, N]]])) == cohen(pairs)


def test_intervals_cover_the_measure():
    counts, values = tally(TWELVE)
    low, high = bootstrap(lambda rows: alpha(rows, values), counts, 300)
    assert low < alpha(counts, values) < high and high - low > 0.1
    assert bootstrap(lambda rows: alpha(rows, values), counts, 300) == (low, high)
    many = np.repeat(counts, 30, 0)
    assert np.subtract(*bootstrap(lambda rows: alpha(rows, values), many, 300)) > low - high  # narrower


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="did you mean `nominal`"):
        krippendorff(TWELVE, "nominel")
    with pytest.raises(DataError, match="negative"):
        krippendorff(-TWELVE, "ratio")
    with pytest.raises(DataError, match="from 1 to 3 ratings"):
        fleiss(np.array([[1, 2], [1, 0]]))
    with pytest.raises(DataError, match="more than 4000"):
        krippendorff(np.arange(5000.0).reshape(-1, 2))
    with pytest.raises(DataError, match="no table"):
        krippendorff(np.array([[math.inf, 1.0]]))
    with pytest.raises(ConfigError, match="linear"):
        cohen(TWELVE[:, :2], "lineal")


# -- raters ------------------------------------------------------------------------------------------------------------


def honest(rng, truth, right=0.8, classes=3):
    """Labels of a rater who is right that often, and else gives any other label."""
    wrong = (truth + rng.integers(1, classes, len(truth))) % classes
    return np.where(rng.random(len(truth)) < right, truth, wrong)


def crowd(seed, spammers=(), good=3, items=1000):
    """True classes, and the labels of honest raters and of others."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, items)
    same = rng.integers(0, 3, items)
    kinds = {
        "random": lambda: rng.integers(0, 3, items),
        "constant": lambda: np.full(items, 2),
        "inverted": lambda: 2 - honest(rng, truth),
        "copied": lambda: same,
        "mostly copied": lambda: np.where(rng.random(items) < 0.9, same, rng.integers(0, 3, items)),
    }
    columns = [honest(rng, truth) for _ in range(good)] + [kinds[kind]() for kind in spammers]
    return truth, Labels.of_matrix(np.stack(columns, 1), 3)


def accuracy(answers, truth):
    return float((answers == truth).mean())


@pytest.mark.parametrize("kind, number", [("random", 4), ("constant", 3), ("inverted", 2)])
def test_the_consensus_survives_spammers_and_names_them(kind, number):
    for seed in range(3):
        truth, labels = crowd(seed, [kind] * number)
        reviewed = review(labels)
        consensus = reviewed.consensus.soft.argmax(1)
        assert accuracy(consensus, truth) > accuracy(majority(labels), truth) + 0.03
        named = [one.rater for one in reviewed.judgements if one.note == "disagrees with all others"]
        assert named == list(range(3, 3 + number)) and reviewed.groups == []


def test_without_spammers_the_consensus_is_no_worse_than_the_majority():
    for seed in range(3):
        truth, labels = crowd(seed, good=5, items=5000)
        for consensus in (*(fit(labels, model) for model in RaterModel), consensus_of(labels)):
            assert accuracy(consensus.soft.argmax(1), truth) >= accuracy(majority(labels), truth) - 0.005
            np.testing.assert_allclose(consensus.soft.sum(1), 1, atol=1e-9)
            np.testing.assert_allclose(consensus.confusion.sum(2), 1, atol=1e-9)
            right = np.einsum("rkk->rk", consensus.confusion).mean()
            assert 0.75 < right < 0.85  # planted: 0.8


def test_the_model_is_taken_that_predicts_unseen_raters():
    for seed in range(3):
        rng = np.random.default_rng(seed)
        truth = rng.integers(0, 10, 200)  # too few labels for five matrices of a hundred numbers
        few = Labels.of_matrix(np.stack([honest(rng, truth, 0.5, 10) for _ in range(5)], 1), 10)
        assert consensus_of(few).model is RaterModel.GUESSES
        place = rng.normal(0, 1, 2000)  # the middle class is taken for its neighbours
        near = np.digitize(place[:, None] + rng.normal(0, 0.7, (2000, 5)), (-0.5, 0.5))
        assert consensus_of(Labels.of_matrix(near, 3)).model is RaterModel.CONFUSION
    nobody = consensus_of(Labels.of_matrix(np.full((4, 2), -1), 3))
    assert nobody.soft.tolist() == [[1 / 3] * 3] * 4
    alone = consensus_of(Labels.of_matrix(np.array([[0], [1], [1]]), 2))
    assert alone.soft.argmax(1).tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copied", "mostly copied"])
def test_raters_who_copy_each_other_are_found_and_count_once(kind):
    for seed in range(2):
        truth, labels = crowd(seed, [kind] * 3)
        clean = accuracy(consensus_of(crowd(seed)[1]).soft.argmax(1), crowd(seed)[0])
        assert accuracy(fit(labels).soft.argmax(1), truth) < 0.5  # taken for the best ones
        assert copies(labels) == [[3, 4, 5]]
        for merge in (True, False):
            reviewed = review(labels, merge=merge)
            assert accuracy(reviewed.consensus.soft.argmax(1), truth) > clean - 0.02
            assert [bool(one.note) for one in reviewed.judgements] == [False] * 3 + [True] * 3


def test_honest_raters_are_rarely_accused():
    rng, accused = np.random.default_rng(0), 0
    for seed in range(20):
        _, labels = crowd(seed, good=int(rng.integers(3, 8)), items=int(rng.integers(60, 400)))
        reviewed = review(labels)
        accused += any(one.note for one in reviewed.judgements)
    assert accused == 0


def test_items_that_are_hard_for_all_make_nobody_a_copy():
    accused = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        truth = rng.integers(0, 3, 1000)
        seems = np.where(rng.random(1000) < 0.25, (truth + 1) % 3, truth)  # to all raters alike
        labels = Labels.of_matrix(np.stack([honest(rng, seems, 0.85) for _ in range(6)], 1), 3)
        accused += bool(copies(labels))
    assert accused == 0


def test_few_labels_judge_nobody():
    _, labels = crowd(0)
    one = Labels(np.append(labels.item, 0), np.append(labels.rater, 3), np.append(labels.label, 1), labels.items, 4, 3)
    judged = review(one).judgements[3]
    assert judged.labels == 1 and math.isnan(judged.kappa) and judged.note == "too few labels to judge"
    for model in RaterModel:
        before, after = fit(labels, model).soft, fit(one, model).soft
        assert (before[1:].argmax(1) == after[1:].argmax(1)).mean() > 0.999
    pair = review(labels.only(labels.rater < 2))
    assert [judged.note for judged in pair.judgements[:2]] == ["two raters cannot be told apart"] * 2
    alike = likeness(Labels.of_matrix(np.full((50, 3), 1), 3), 0, 1)
    assert (alike.copied, alike.deviations) == (0.0, 0.0)
    assert votes(Labels.of_matrix(np.full((2, 2), -1), 4)).tolist() == [[0.25] * 4] * 2


def test_labels_that_make_no_sense_are_refused():
    zero, one = np.array([0, 0]), np.array([0, 1])
    with pytest.raises(DataError, match="twice"):
        Labels(zero, zero, one, 1, 1, 2)
    with pytest.raises(DataError, match="labels of the labels are not 2 numbers from 0 to 1"):
        Labels(one, zero, one + 1, 2, 1, 2)
