"""Bars of layer selection, at equal bytes: by the gain of each layer against all other ways."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from benchmarks.comm.contest import Contest
from benchmarks.comm.curves import final, step_bytes
from benchmarks.comm.efficiency import Ask
from benchmarks.comm.methods import Method
from benchmarks.comm.methods import ours as feature
from benchmarks.comm.setting import Setting
from benchmarks.comm.spec import Spec
from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import of_mean

CHOOSING, FRESH = (221, 222, 223), (231, 232, 233, 234, 235)
"""Used once: those from 201 to 215 were looked at before the objective was changed, and after."""
LRS = (2e-3, 4e-3)
STEPS, LOOK = 150, 10
SMALL = Setting(dim=128, layers=4, hidden=352, held_out=64)  # 1.06 M parameters: a whole exchange sends 6.4 MB a rank
BUDGET_KB = 640.0


def method(selector: str, lr: float) -> Method:
    return feature(f"dense, {selector}", "Dense", lr=lr, select=selector, budget_kb=BUDGET_KB, bucket_mb=1000, parts=1)


def run(contest: Contest, of: Method, seed: int) -> tuple[float, float]:
    """The smoothed held-out loss at the end, and bytes a step."""
    trial = contest.sizes.slow_steps < 20
    steps, setting = (10, contest.sizes.setting) if trial else (STEPS, SMALL)
    look = 2 if trial else LOOK
    spec = Spec(methods=(of,), turn=steps, look=look, seed=seed, horizon=steps, setting=setting)
    logs = contest.store.get(spec)["logs"][0]
    return final(logs[0]["held_out"], steps), step_bytes(logs)


def tuned(contest: Contest, selector: str) -> Method:
    """With the learning rate that is best on the seeds for choosing."""
    candidates = [method(selector, lr) for lr in LRS]
    return min(candidates, key=lambda each: fmean(run(contest, each, seed)[0] for seed in CHOOSING))


def gap(ask: Ask, against: str, _: Deadline) -> Measured:
    """Held-out loss with the gain minus the other's, the mean over fresh seeds."""
    contest = ask()
    ours, theirs = tuned(contest, "gain"), tuned(contest, against)
    pairs = [(run(contest, ours, seed), run(contest, theirs, seed)) for seed in FRESH]
    gaps = [one[0] - other[0] for one, other in pairs]
    sent = [fmean(pair[side][1] for pair in pairs) / 1e3 for side in (0, 1)]
    note = (
        f"by seed {', '.join(f'{each:+.4f}' for each in gaps)}; {sent[0]:.0f} and {sent[1]:.0f} kB a rank and step; "
        f"rates {ours.lr:g} and {theirs.lr:g} of {', '.join(f'{lr:g}' for lr in LRS)}, on seeds {CHOOSING}; "
        "1.06 M parameters, 150 steps"
    )
    return of_mean(gaps, note)


def rows(ask: Ask) -> list[Bar]:
    """All bars of this module."""
    return [
        Bar(
            f"comm.select-{against}",
            f"held-out loss with layers chosen by their gain minus with {words}, equal bytes, nats a token",
            "<=",
            0.0,
            measure=partial(gap, ask, against),
            baseline=words,
            seeds=FRESH,
            kind="drawn",
        )
        for against, words in (
            ("uniform", "a uniform choice"),
            ("knapsack", "a knapsack over measured errors"),
            ("hypernetwork", "the hypernetwork's choice"),
            ("per-node", "a hypernetwork's choice on each rank for itself"),
        )
    ]
