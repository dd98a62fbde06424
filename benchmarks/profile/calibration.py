"""Measures how far predicted gains are from those after the fix, for the analyses to make intervals of.

`python -m benchmarks.profile.calibration [--runs FOLDER]` writes `src/shoestring/profile/analyses/calibration.json`: of
each analysis the mean and the standard deviation of its errors, as log odds, on the programs that the author of the
analyses planted. Those of others do not count, for they are what the intervals are judged by.

A part of each error is chance: a profile and a measured gain differ from one run to the next, and both say by how much.
What remains is estimated as the variance between studies is in a meta-analysis with random effects (DerSimonian and
Laird, 1986), of all analyses together; the mean of each is drawn to that of all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.profile.findings import Judged, Trial, predicted
from benchmarks.rows import RESULTS
from shoestring.profile.analyses import gains

LEAST = 0.04
"""Standard deviation of errors that no few programs are taken to show to be smaller."""
SURE = 1.96
"""Standard deviations either way of an interval of 95%."""


@dataclass(frozen=True)
class Error:
    """Of one program: measured gain less the estimate, both as log odds."""

    analysis: str
    error: float
    variance: float
    """Of chance, in the profile and in the measured gain."""


def errors(judged: Iterable[Judged]) -> list[Error]:
    """Those of the programs of the author of the analyses."""
    found = []
    for each, gain in predicted([each for each in judged if each.kind == "author"]):
        low, high = each.gain_interval
        if low > 0:
            measured = (gains.log_odds(high) - gains.log_odds(low)) / 2 / SURE
            error = gains.log_odds(each.gain) - gains.estimate(each.analysis, gain)
            found.append(Error(each.analysis, error, gains.chance(each.analysis, gain) ** 2 + measured**2))
    return found


def calibrated(errors: Sequence[Error]) -> Mapping[str, tuple[float, float]]:
    """Mean and standard deviation by analysis; those of all have an empty name."""
    value, variance = (np.array([getattr(each, name) for each in errors]) for name in ("error", "variance"))
    weight = 1 / np.maximum(variance, 1e-4)
    middle = (weight * value).sum() / weight.sum()
    heterogeneity = (weight * (value - middle) ** 2).sum() - (len(value) - 1)
    scale = weight.sum() - (weight**2).sum() / weight.sum()
    between = max(heterogeneity / max(scale, 1e-9), LEAST**2)
    weight = 1 / (variance + between)
    middle = (weight * value).sum() / weight.sum()
    table = {"": (middle, between**0.5)}
    for name in sorted({each.analysis for each in errors}):
        own = np.array([each.analysis == name for each in errors])
        mean = ((weight * value)[own].sum() + middle / between) / (weight[own].sum() + 1 / between)
        table[name] = (mean, between**0.5)
    return {name: (round(float(mean), 4), round(float(deviation), 4)) for name, (mean, deviation) in table.items()}


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--runs", type=Path, default=RESULTS / "runs" / "profile")
    runs = flags.parse_args(argv).runs
    table = calibrated(errors(Trial(runs, lambda: None).judged(gains=True)))
    path = Path(gains.__file__).with_name("calibration.json")
    path.write_text(json.dumps(table, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
