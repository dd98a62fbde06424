"""Does `shoestring plan` find the fastest plan? Beside plans by hand, on pairs of models and clusters."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Deadline
from benchmarks.machine import ROOT, git_tree
from benchmarks.parallel.pairs import PAIRS
from benchmarks.parallel.quotas import processor_quotas
from benchmarks.rows import Measured, NotRun
from shoestring.testing.netlab import netlab, netlab_available

TIMEOUT = 1200.0
CLOSE, FAR = 1.05, 1.15
BEST = "planned"
"""Name of the planner's choice among the plans of a pair."""


@cache
def outcome(name: str) -> dict[str, Any]:
    """What `benchmarks.parallel.plan_worker` writes of a pair; what this tree has measured before is read again."""
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    tree = git_tree()
    stored = ROOT / ".cache" / "parallel" / tree / f"{name.replace(' ', '-').replace(',', '')}.json"
    if stored.exists() and not tree.endswith("-dirty"):
        return json.loads(stored.read_text())
    with tempfile.TemporaryDirectory() as folder, processor_quotas(pair.hosts) as group:
        out = Path(folder) / "outcome.json"
        with netlab(hosts=pair.hosts, rate=pair.rate) as lab:
            command = ["-m", "benchmarks.parallel.plan_worker", str(out), pair.name, group]
            program = lab.torchrun(command, nproc=pair.ranks, env={"OMP_NUM_THREADS": "1"})
            try:
                program.check(timeout=TIMEOUT)
            finally:
                program.kill()
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(out.read_text())
        return json.loads(out.read_text())


def of_pairs(deadline: Deadline, *, measured: bool | None = None) -> Mapping[str, dict[str, Any]] | NotRun:
    """The outcomes of the pairs that are measured, of those that are only predicted, or of all."""
    if reason := netlab_available():
        return NotRun(reason)
    chosen = [pair for pair in PAIRS if measured in (None, pair.measured)]
    outcomes = dict[str, dict[str, Any]]()
    for pair in chosen:
        deadline.check()
        outcomes[pair.name] = outcome(pair.name)
    return outcomes


def behind(found: Mapping[str, Any]) -> float:
    """How many times as long the planner's choice takes as the best of all plans, in medians of blocks."""
    seconds = {name: statistics.median(values) for name, values in found["seconds"].items()}
    return seconds[BEST] / min(seconds.values())


def _of(
    values: Callable[[Mapping[str, dict[str, Any]]], Measured], *, measured: bool | None = None
) -> Callable[..., Any]:
    def measure(deadline: Deadline) -> Measured | NotRun:
        outcomes = of_pairs(deadline, measured=measured)
        return outcomes if isinstance(outcomes, NotRun) else values(outcomes)

    return measure


def close(outcomes: Mapping[str, dict[str, Any]]) -> Measured:
    """Pairs whose choice is within 5% of the best plan."""
    ratios = {name: behind(one) for name, one in outcomes.items()}
    return Measured(sum(ratio <= CLOSE for ratio in ratios.values()), _told(ratios))


def worst(outcomes: Mapping[str, dict[str, Any]]) -> Measured:
    """How far the worst choice is behind the best plan."""
    ratios = {name: behind(one) for name, one in outcomes.items()}
    return Measured(max(ratios.values()), _told(ratios))


def predicted(outcomes: Mapping[str, dict[str, Any]]) -> Measured:
    """Measured pairs whose choice took as long as predicted, within 15%."""
    ratios = {name: one["predicted"][BEST] / statistics.median(one["seconds"][BEST]) for name, one in outcomes.items()}
    return Measured(sum(abs(ratio - 1) <= FAR - 1 for ratio in ratios.values()), _told(ratios))


def ranked(outcomes: Mapping[str, dict[str, Any]]) -> Measured:
    """Spearman's rank correlation of predicted and measured seconds, over all plans of the measured pairs."""
    both = [
        (one["predicted"][name], statistics.median(one["seconds"][name]))
        for one in outcomes.values()
        for name in one["seconds"]
    ]
    value = _spearman([first for first, _ in both], [second for _, second in both])
    within = [
        _spearman(
            [one["predicted"][name] for name in one["seconds"]],
            [statistics.median(values) for values in one["seconds"].values()],
        )
        for one in outcomes.values()
    ]
    return Measured(value, f"of {len(both)} plans; within the pairs {', '.join(f'{part:.2f}' for part in within)}")


def searching(outcomes: Mapping[str, dict[str, Any]]) -> Measured:
    """Seconds of the slowest search, after measuring."""
    return Measured(max(one["searching"] for one in outcomes.values()), f"{len(outcomes)} pairs")


def views(outcomes: Mapping[str, dict[str, Any]]) -> Measured:
    """The choice's speed beside that of the best exchange of whole replicas, where these fit; the smallest ratio."""
    ratios = {
        name: one["exchange"] / statistics.median(one["seconds"][BEST])
        for name, one in outcomes.items()
        if one["exchange"]
    }
    return Measured(min(ratios.values()), _told(ratios))


def _told(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items())


def _spearman(first: Sequence[float], second: Sequence[float]) -> float:
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def rows() -> list[Bar]:
    """The bars of the planner."""
    over = f"{len(PAIRS)} pairs of a model and a cluster, six of them measured on virtual hosts, with plans by hand"

    def bar(name: str, what: str, least: bool, limit: float, measure: Callable[..., Any]) -> Bar:
        return Bar(f"parallel.plan-{name}", what, ">=" if least else "<=", limit, measure, kind="exact")

    behind_best = f"seconds of the chosen plan over those of the best, the worst of {over}"
    as_told = "measured pairs of six whose chosen plan takes as long as predicted, within 15%"
    beside = "speed of the chosen plan over that of what `comm.auto` chose, the smallest of the measured pairs"
    return [
        bar("close", f"pairs whose chosen plan is within 5% of the best: {over}", True, 10, _of(close)),
        bar("worst", behind_best, False, FAR, _of(worst)),
        bar("predicted", as_told, True, 5, _of(predicted, measured=True)),
        bar("ranks", "Spearman's correlation of predicted and measured seconds", True, 0.8, _of(ranked, measured=True)),
        bar("seconds", "seconds of the slowest search, after measuring", False, 60, _of(searching)),
        bar("views", beside, True, 0.97, _of(views, measured=True)),
    ]
