"""95% confidence intervals of what benchmarks sample: means over seeds, medians over rounds, shares of cases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.rows import Interval, Measured
from benchmarks.timing import FEWEST_ROUNDS, sign_test_rank
from shoestring.core.errors import ConfigError


def of_mean(values: Sequence[float], note: str = "") -> Measured:
    """The mean of independent, roughly normal values (one a seed), with Student's interval.

    Raises:
        ConfigError: there are fewer than two, which have no interval.
    """
    if len(values) < 2:
        raise ConfigError(f"{len(values)} values have no interval of their mean", hint="run more seeds")
    from scipy import stats

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return Measured(mean, note, (mean - reach, mean + reach))


def of_ratio(above: Sequence[float], below: Sequence[float], note: str = "") -> Measured:
    """The ratio of paired values (one pair a seed), as the geometric mean of their ratios with Student's interval."""
    logs = of_mean([math.log(a / b) for a, b in zip(above, below, strict=True)])
    assert logs.interval is not None
    low, high = map(math.exp, logs.interval)
    return Measured(math.exp(logs.value), note, (low, high))


def of_unpaired_ratio(above: Sequence[float], below: Sequence[float], note: str = "") -> Measured:
    """The ratio of the geometric means of two independent samples, with Welch's interval of the logarithm."""
    from scipy import stats

    logs = [[math.log(value) for value in sample] for sample in (above, below)]
    compared = stats.ttest_ind(*logs, equal_var=False)
    low, high = compared.confidence_interval(0.95)
    mean = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    return Measured(math.exp(mean), note, (math.exp(float(low)), math.exp(float(high))))


def of_median(values: Sequence[float], note: str = "") -> Measured:
    """The median of independent values, with the interval of the inverted sign test (`Paired.interval`).

    Raises:
        ConfigError: there are too few for an interval of 95%.
    """
    if len(values) < FEWEST_ROUNDS:
        raise ConfigError(f"{len(values)} values have no 95% interval of their median", hint=f"take {FEWEST_ROUNDS}")
    ordered, rank = sorted(values), sign_test_rank(len(values))
    return Measured(statistics.median(ordered), note, (ordered[rank - 1], ordered[-rank]))


def of_quantile(values: Sequence[float], share: float, note: str = "") -> Measured:
    """A quantile of independent values, with the interval between two of them that the binomial distribution gives.

    Raises:
        ConfigError: there are too few values for an interval of 95%.
    """
    from scipy import stats

    count, ordered = len(values), sorted(values)
    low, high = (int(stats.binom.ppf(end, count, share)) for end in (0.025, 0.975))
    if low < 1 or high >= count:
        raise ConfigError(f"{count} values have no 95% interval of their {share:.0%} quantile", hint="take more")
    return Measured(ordered[math.ceil(share * count) - 1], note, (ordered[low - 1], ordered[high]))


def of_share(hits: int, cases: int, note: str = "") -> Measured:
    """A share of independent cases, with the exact interval of Clopper and Pearson.

    Raises:
        ConfigError: there are no cases.
    """
    if cases < 1:
        raise ConfigError("a share of no cases")
    from scipy import stats

    low = 0.0 if hits == 0 else float(stats.beta.ppf(0.025, hits, cases - hits + 1))
    high = 1.0 if hits == cases else float(stats.beta.ppf(0.975, hits + 1, cases - hits))
    return Measured(hits / cases, note, (low, high))


def normal(mean: float, error: float) -> Interval:
    """The interval of an estimate from very many samples, by its standard error."""
    return mean - 1.96 * error, mean + 1.96 * error
