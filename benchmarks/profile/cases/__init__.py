"""Case studies: what the profiler showed, the change, and how much faster the program became.

`docs/case-studies.md` tells them. Those of packages that are not installed are taken from what is stored of them:

pip install --no-deps torch-geometric==2.8.1 diffusers==0.42.1
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured, NotRun, stored
from benchmarks.profile.cases import areas, packages, workloads
from benchmarks.profile.cases.case import Case

__all__ = ["CASES", "rows"]

CASES = [*workloads.CASES, *packages.CASES, *areas.CASES]
ENOUGH = 1.06


def measured(case: Case) -> dict[str, Any]:
    """A case's times, in a form that is stored."""
    found = case.measure()
    times = {"before": found.a_seconds / case.steps, "after": found.b_seconds / case.steps}
    return {"faster": found.median, "interval": list(found.interval), "seconds": times}


def rows(folder: Path, check: Callable[[], None]) -> list[Bar]:
    """The bar of the case studies; what is measured of each is stored in the folder."""

    def count(deadline: Deadline) -> Measured | NotRun:
        results: dict[str, dict[str, Any]] = {}
        for case in CASES:
            path = folder / f"{case.name}.json"
            if path.exists() or all(find_spec(package) for package in case.packages):
                results[case.name] = stored(path, check, lambda case=case: measured(case))
        missing = [case.name for case in CASES if case.name not in results]
        told = [
            f"{name} {result['faster']:.2f}x ({result['interval'][0]:.2f} to {result['interval'][1]:.2f})"
            for name, result in results.items()
        ]
        note = f"{', '.join(told)}; not installed: {', '.join(missing) or 'none'}"
        return Measured(sum(result["faster"] >= ENOUGH for result in results.values()), note)

    return [
        Bar("profile.case-studies", f"Case studies whose change makes them at least {ENOUGH}x as fast", ">=", 8, count)
    ]
