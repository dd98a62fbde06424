"""Does `shoestring plan` find the fastest plan? Beside plans by hand, on pairs of models and clusters."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.calm import was_calm
from benchmarks.harness import Bar, Deadline
from benchmarks.machine import ROOT, git_tree
from benchmarks.parallel.pairs import NO_GAIN, PAIRS, Pair
from benchmarks.parallel.quotas import processor_quotas
from benchmarks.rows import Measured, NotRun
from shoestring.testing.netlab import netlab, netlab_available

TIMEOUT = 1200.0
CLOSE, FAR = 1.05, 1.15
BEST = "planned"
"""Name of the planner's choice among the plans of a pair."""
Outcomes = Mapping[str, dict[str, Any]]
"""What was measured of pairs, by their names."""


def pair_named(name: str) -> Pair:
    """The pair of a name."""
    (pair,) = (pair for pair in (*PAIRS, *NO_GAIN) if pair.name == name)
    return pair


@cache
def outcome(name: str) -> dict[str, Any]:
    """What `benchmarks.parallel.plan_worker` writes of a pair; what this tree has measured before is read again."""
    pair = pair_named(name)
    tree = git_tree()
    stored = ROOT / ".cache" / "parallel" / tree / f"{name.replace(' ', '-').replace(',', '')}.json"
    if stored.exists() and not tree.endswith("-dirty"):
        return json.loads(stored.read_text())
    was_calm()  # what lies between two pairs does not count
    text = _measured(pair)
    while not was_calm():
        text = _measured(pair)
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text(text)
    return json.loads(text)


def _measured(pair: Pair) -> str:
    """Run all ranks of a pair; returns what the first one writes."""
    with tempfile.TemporaryDirectory() as folder, processor_quotas(pair.hosts) as group:
        out = Path(folder) / "outcome.json"
        with netlab(hosts=pair.hosts, rate=pair.rate) as lab:
            command = ["-m", "benchmarks.parallel.plan_worker", str(out), pair.name, group]
            program = lab.torchrun(command, nproc=pair.ranks, env={"OMP_NUM_THREADS": "1"})
            try:
                program.check(timeout=TIMEOUT)
            finally:
                program.kill()
        return out.read_text()


def of_pairs(deadline: Deadline, *, measured: bool | None = None, pairs: Sequence[Pair] = PAIRS) -> Outcomes | NotRun:
    """The outcomes of the pairs that are measured, of those that are only predicted, or of all."""
    if reason := netlab_available():
        return NotRun(reason)
    chosen = [pair for pair in pairs if measured in (None, pair.measured)]
    outcomes = dict[str, dict[str, Any]]()
    for pair in chosen:
        deadline.check()
        outcomes[pair.name] = outcome(pair.name)
    return outcomes


def behind(found: Mapping[str, Any]) -> float:
    """How many times as long the planner's choice takes as the best of all plans, in medians of blocks."""
    seconds = {name: statistics.median(values) for name, values in found["seconds"].items()}
    return seconds[BEST] / min(seconds.values())


def measuring(
    value: Callable[[Outcomes], float],
    told: Callable[[Outcomes], str],
    *,
    measured: bool | None = None,
    pairs: Sequence[Pair] = PAIRS,
) -> Callable[..., Any]:
    """What measures a value of the outcomes, with its interval over the blocks of steps that were measured."""

    def measure(deadline: Deadline) -> Measured | NotRun:
        outcomes = of_pairs(deadline, measured=measured, pairs=pairs)
        if isinstance(outcomes, NotRun):
            return outcomes
        return Measured(value(outcomes), told(outcomes), spread(outcomes, value))

    return measure


def spread(outcomes: Outcomes, value: Callable[[Outcomes], float], rounds: int = 2000) -> tuple[float, float]:
    """The 95% interval of a value when the blocks of each measured pair are drawn again (bootstrap)."""
    draw, values = random.Random(0), list[float]()
    for _ in range(rounds):
        drawn = dict[str, dict[str, Any]]()
        for name, one in outcomes.items():
            count = len(one["seconds"][BEST])
            blocks = draw.choices(range(count), k=count)  # the same of all plans, for their steps alternate
            again = {plan: [values[block] for block in blocks] for plan, values in one["seconds"].items()}
            drawn[name] = one | {"seconds": again}
        values.append(value(drawn))
    values.sort()
    return values[int(0.025 * rounds)], values[int(0.975 * rounds)]


def _ratios(outcomes: Outcomes, ratio: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    return {name: ratio(one) for name, one in outcomes.items()}


def of_prediction(one: Mapping[str, Any]) -> float:
    """Predicted over measured seconds of the choice."""
    return one["predicted"][BEST] / statistics.median(one["seconds"][BEST])


def of_exchange(outcomes: Outcomes) -> dict[str, float]:
    """The choice's speed beside that of the best exchange of whole replicas, where these fit."""
    found = {name: one for name, one in outcomes.items() if one["exchange"]}
    return _ratios(found, lambda one: one["exchange"] / statistics.median(one["seconds"][BEST]))


def close(outcomes: Outcomes) -> float:
    """Pairs whose choice is within 5% of the best plan."""
    return sum(ratio <= CLOSE for ratio in _ratios(outcomes, behind).values())


def worst(outcomes: Outcomes) -> float:
    """How far the worst choice is behind the best plan."""
    return max(_ratios(outcomes, behind).values())


def as_predicted(outcomes: Outcomes) -> float:
    """Pairs whose choice took as long as predicted, within 15%."""
    return sum(abs(ratio - 1) <= FAR - 1 for ratio in _ratios(outcomes, of_prediction).values())


def ranked(outcomes: Outcomes) -> float:
    """Spearman's rank correlation of predicted and measured seconds, over all plans of the pairs."""
    from scipy import stats

    both = [
        (one["predicted"][name], statistics.median(values))
        for one in outcomes.values()
        for name, values in one["seconds"].items()
    ]
    return float(stats.spearmanr(*zip(*both, strict=True)).statistic)


def searching(outcomes: Outcomes) -> float:
    """Seconds of the slowest search, after measuring."""
    return max(one["searching"] for one in outcomes.values())


def views(outcomes: Outcomes) -> float:
    """The smallest speed of a choice beside the best exchange of whole replicas."""
    return min(of_exchange(outcomes).values())


def _told(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items())


def _told_behind(outcomes: Outcomes) -> str:
    return _told(_ratios(outcomes, behind))


def _told_ranks(outcomes: Outcomes) -> str:
    count = sum(len(one["seconds"]) for one in outcomes.values())
    within = ", ".join(f"{ranked({name: one}):.2f}" for name, one in outcomes.items())
    return f"of {count} plans; within the pairs {within}"


def rows() -> list[Bar]:
    """The bars of the planner, on pairs that were not looked at while it was mended."""
    over = f"{len(PAIRS)} pairs of a model and a cluster, six of them measured on virtual hosts, with plans by hand"

    def bar(name: str, what: str, least: bool, limit: float, measure: Callable[..., Any]) -> Bar:
        return Bar(f"parallel.plan-{name}", what, ">=" if least else "<=", limit, measure)

    behind_best = f"seconds of the chosen plan over those of the best, the worst of {over}"
    as_told = "measured pairs of six whose chosen plan takes as long as predicted, within 15%"
    beside = "speed of the chosen plan over that of what `comm.auto` chose, the smallest of the measured pairs"
    ranks = "Spearman's correlation of predicted and measured seconds"
    predictions = measuring(as_predicted, lambda outcomes: _told(_ratios(outcomes, of_prediction)), measured=True)
    exchanges = measuring(views, lambda outcomes: _told(of_exchange(outcomes)), measured=True)
    searches = measuring(searching, lambda outcomes: f"{len(outcomes)} pairs")
    return [
        bar(
            "close",
            f"pairs whose chosen plan is within 5% of the best: {over}",
            True,
            10,
            measuring(close, _told_behind),
        ),
        bar("worst", behind_best, False, FAR, measuring(worst, _told_behind)),
        bar("predicted", as_told, True, 5, predictions),
        bar("ranks", ranks, True, 0.8, measuring(ranked, _told_ranks, measured=True)),
        bar("seconds", "seconds of the slowest search, after measuring", False, 60, searches),
        bar("views", beside, True, 0.97, exchanges),
    ]
