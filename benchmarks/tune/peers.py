"""Bars of tune.kills beside other tuners: what they lose under the same kills, stalls and outages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Measured, NotRun, stored
from benchmarks.tune import kills

PEER_BATCHES = 1
"""Batches of a peer; ours of the same numbers are compared with them."""


def off(found: list[dict[str, Any]]) -> float:
    """Trials without exactly one right result, for each 100 trials."""
    return 100 * sum(each["lost"] + each["twice"] + each["wrong"] for each in found) / _sum(found, "trials")


def repeated(found: list[dict[str, Any]]) -> float:
    """Steps that are repeated for each start of a trial beyond its first."""
    return _sum(found, "repeated") / max(_sum(found, "starts") - _sum(found, "trials"), 1)


def _sum(found: list[dict[str, Any]], name: str) -> int:
    return sum(each[name] for each in found)


def ours(runs: Path, check: Callable[[], None]) -> list[dict[str, Any]]:
    """Our batches of the same numbers, in the peers' terms."""
    batches = [
        stored(runs / f"kills-{number}.json", check, lambda number=number: kills.batch(number))
        for number in range(PEER_BATCHES)
    ]
    same = {"trials": kills.TRIALS, "twice": 0, "wrong": 0}
    return [each | same | {"lost": len(each["wrong"])} for each in batches]


def said_of(found: list[dict[str, Any]]) -> str:
    """What became of a peer's trials."""
    names = ("trials", "lost", "running", "twice", "wrong", "kills", "stalls", "outages", "crashes")
    counts = ", ".join(f"{_sum(found, name)} {name}" for name in names if name in found[0])
    return f"{counts}; {repeated(found):.1f} steps repeated a restart of {_sum(found, 'starts')} starts"


def peer_rows(peer: str, name: str, measure: Callable[[], list[dict[str, Any]] | NotRun], runs: Path,
              check: Callable[[], None]) -> list[Bar]:  # fmt: skip
    """Two bars: results, and repeated steps, beside a peer's."""

    def compared(value: Callable[[list[dict[str, Any]]], float]) -> Measured | NotRun:
        theirs = measure()
        if isinstance(theirs, NotRun):
            return theirs
        own = ours(runs, check)
        note = f"{name}: {value(theirs):.3g} ({said_of(theirs)}); shoestring: {value(own):.3g} ({said_of(own)})"
        return Measured(value(own) - value(theirs), note)

    said = f"{PEER_BATCHES} of the studies of tune.kills-results, under the same kills, stalls and outages"
    return [
        Bar(
            f"tune.kills-{peer}-results",
            f"trials without exactly one right result, for each 100, less those of {name}; {said}",
            "<=",
            0.0,
            lambda _: compared(off),
            baseline=name,
            kind="drawn",
        ),
        Bar(
            f"tune.kills-{peer}-repeated",
            f"steps that are repeated for each start of a trial beyond its first, less those of {name}; {said}",
            "<=",
            0.0,
            lambda _: compared(repeated),
            baseline=name,
            kind="drawn",
        ),
    ]
