"""The recipe `quality`: pairs of distorted pictures in the right order, beside classical features with an SVR."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import Bar, Deadline, NotRun


def unseen(runs: Path, deadline: Deadline) -> NotRun:
    """How much larger the network's share of ordered pairs is than the baseline's, on kinds that neither has seen."""
    return NotRun(f"no trainings in {runs.name}")


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    return [
        Bar(
            "recipes.quality-unseen",
            "quality: share of pairs in the right order on kinds of distortion never taught, above NSS + SVR's",
            ">",
            0.0,
            lambda _: unseen(runs, deadline),
            baseline="NSS features and a support vector regression on the same photos and kinds",
            kind="drawn",
        )
    ]
