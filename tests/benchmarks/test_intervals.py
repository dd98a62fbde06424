"""Intervals against known values, and against what they promise: coverage."""

import numpy as np
import pytest

from benchmarks.intervals import of_mean, of_median, of_quantile, of_ratio, of_share, of_unpaired_ratio
from shoestring.core.errors import ConfigError


def test_known_intervals():
    mean = of_mean([1.0, 2.0, 3.0])  # t(2, 97.5%) = 4.3027, standard error 1 / sqrt(3)
    assert (mean.value, *mean.interval) == pytest.approx((2.0, -0.4841, 4.4841), abs=1e-4)
    share = of_share(29, 30)  # R: binom.test(29, 30)
    assert (share.value, *share.interval) == pytest.approx((0.9667, 0.8278, 0.9992), abs=1e-4)
    assert of_share(0, 5).interval == pytest.approx((0.0, 0.5218), abs=1e-4)
    assert of_share(5, 5).interval == pytest.approx((0.4782, 1.0), abs=1e-4)
    assert of_median([5, 1, 4, 2, 3, 6]).interval == (1, 6)
    ratio = of_ratio([2.0, 8.0], [1.0, 4.0])
    assert (ratio.value, *ratio.interval) == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize("planted", [lambda: of_mean([1.0]), lambda: of_median([1.0] * 5), lambda: of_share(0, 0)])
def test_too_few_values_have_no_interval(planted):
    with pytest.raises(ConfigError):
        planted()


def test_intervals_cover_what_they_are_of():
    random = np.random.default_rng(5)
    rows = random.normal(3.0, 1.0, (1000, 5))
    covered = [low <= 3.0 <= high for low, high in (of_mean(row).interval for row in rows)]
    assert 0.93 <= np.mean(covered) <= 0.97
    hits = random.binomial(40, 0.9, 1000)
    covered = [low <= 0.9 <= high for low, high in (of_share(int(hit), 40).interval for hit in hits)]
    assert np.mean(covered) >= 0.95  # exact intervals are never narrower than they say


def test_an_unpaired_ratio_is_welchs():
    found = of_unpaired_ratio([200.0, 220.0, 210.0], [100.0, 105.0, 110.0])
    assert found.value == pytest.approx(2.0, abs=1e-3)
    assert found.interval[0] < 2.0 < found.interval[1]
    assert found.interval[0] * found.interval[1] == pytest.approx(found.value**2)


def test_a_quantile_lies_between_values_whose_ranks_the_binomial_gives():
    measured = of_quantile(list(range(1, 201)), 0.95)
    assert (measured.value, measured.interval) == (190, (184, 197))
    covered = 0
    for seed in range(300):
        low, high = of_quantile(np.random.default_rng(seed).random(200).tolist(), 0.95).interval
        covered += low <= 0.95 <= high
    assert covered >= 0.93 * 300
    with pytest.raises(ConfigError, match="have no 95% interval"):
        of_quantile([1.0] * 20, 0.95)
