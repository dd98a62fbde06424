"""Measures how far predicted gains are from those after the fix, for the analyses to make intervals of.

`python -m benchmarks.profile.calibration [--runs FOLDER]` writes `src/shoestring/profile/analyses/calibration.json`: of
each analysis the middle of its errors and how far they are from it, as log odds, on the programs that the author of the
analyses has seen. Programs of others that nobody has seen do not count, for they are what the intervals are judged by.

Every program is profiled anew; gains are those that `findings.py` has stored. How far errors are is told by the
distance that nine of ten do not exceed, whatever the tenth does, over that of a normal distribution. What few programs
say of an analysis is drawn to what all say, by as much as if `BORROWED` programs of all were among its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import stored
from benchmarks.profile.findings import ROOT, Trial, statement_lines
from benchmarks.rows import RESULTS
from shoestring.profile.analyses import gains

LEAST = 0.04
"""Standard deviation of errors that no few programs are taken to show to be smaller."""
BORROWED = 3
MOST, DEVIATIONS = 0.9, 1.645
"""Part of all errors that are no larger than so many standard deviations."""


@dataclass(frozen=True)
class Error:
    """Of one program: measured gain less the estimate, both as log odds."""

    analysis: str
    error: float


def expected_of(program: Any) -> dict[str, float]:
    """What the fix of a program is expected to save; 0 where its fault is not found, or only a limit is known."""
    import torch

    from shoestring.profile import profiled
    from shoestring.profile.analyses import ANALYSES
    from shoestring.profile.analyses.reading import Reading
    from shoestring.profile.findings import by_gain

    torch.set_num_threads(1)
    program.run(2)
    with profiled() as result:
        program.run(program.steps)
    places = [(str(Path(file).relative_to(ROOT)), line) for file, line in program.lines]
    lines = {(str(ROOT / file), line) for file, line in statement_lines(places)}
    found = by_gain(ANALYSES[program.analysis](Reading(result.profile)))
    right = found and (found[0].file, found[0].line) in lines and not found[0].limit
    return {"expected": found[0].expected if right else 0.0}


def errors(runs: Path) -> list[Error]:
    """Those of the programs whose faults are found and whose fixes gain anything."""
    from benchmarks.profile import blind2, planted, planted_by_author

    sets = {"author": planted_by_author, "blind": planted, "blind2": blind2}
    measured = {(each.kind, each.name): each.gain for each in Trial(runs, lambda: None).judged(gains=True)}
    found = []
    for kind, programs in sets.items():
        for program in programs.PLANTED:
            gain = measured.get((kind, program.name), 0.0)
            if gain <= 0:
                continue
            path = runs / "expected" / kind / f"{program.name}.json"
            expected = stored(path, lambda: None, partial(expected_of, program))["expected"]
            if expected > 0:
                error = gains.log_odds(gain) - gains.estimate(program.analysis, expected)
                found.append(Error(program.analysis, error))
    return found


def calibrated(errors: Sequence[Error]) -> Mapping[str, tuple[float, float]]:
    """Middle and standard deviation by analysis; those of all have an empty name."""
    everything = np.array([each.error for each in errors])
    middle = float(np.median(everything))
    deviation = max(_deviation(everything - middle), LEAST)
    table = {"": (middle, deviation)}
    for name in sorted({each.analysis for each in errors}):
        own = np.array([each.error for each in errors if each.analysis == name])
        weight = len(own) + BORROWED
        its_middle = (len(own) * float(np.median(own)) + BORROWED * middle) / weight
        squares = len(own) * _deviation(own - its_middle) ** 2 + BORROWED * deviation**2
        table[name] = (its_middle, max((squares / weight) ** 0.5, LEAST))
    return {name: (round(middle, 4), round(deviation, 4)) for name, (middle, deviation) in table.items()}


def _deviation(errors: np.ndarray) -> float:
    return float(np.quantile(np.abs(errors), MOST)) / DEVIATIONS


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--runs", type=Path, default=RESULTS / "runs" / "profile")
    runs = flags.parse_args(argv).runs
    table = calibrated(errors(runs))
    path = Path(gains.__file__).with_name("calibration.json")
    path.write_text(json.dumps(table, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
