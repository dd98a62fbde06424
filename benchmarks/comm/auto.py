"""Bars of comm.auto: never slower than DDP, and a step takes what it said."""

from __future__ import annotations

from functools import partial
from statistics import fmean, median

from benchmarks.comm.contest import Contest
from benchmarks.comm.curves import step_seconds, stretches
from benchmarks.comm.efficiency import Ask
from benchmarks.comm.methods import DDP, ours
from benchmarks.comm.spec import Spec
from benchmarks.harness import Bar, Deadline, Measured, Paired

RATES = ("50mbit", "100mbit", "1gbit", "")
AUTO = ours("comm.auto", "Auto")
ROUNDS, TURN = 12, 2
FAST = ("1gbit", "")
"""Where a step takes under a second, so that twice as many rounds can be had."""


def named(rate: str) -> tuple[str, str]:
    """A rate in an id, and in words."""
    return {"": ("loopback", "an unlimited link"), "1gbit": ("1000", "1 Gbit/s")}.get(
        rate, (rate.removesuffix("mbit"), f"{rate.removesuffix('mbit')} Mbit/s")
    )


def rounds_at(rate: str) -> int:
    return 2 * ROUNDS if rate in FAST else ROUNDS


def spec(contest: Contest, rate: str) -> Spec:
    """DDP and comm.auto in turns; the links are slow from the start, for comm.auto measures them."""
    rounds = rounds_at(rate) if contest.sizes.slow_steps >= 20 else 6
    return Spec(
        methods=(DDP, AUTO), turn=TURN, rounds=rounds, warm=6, rate=rate, slow_first=True, setting=contest.sizes.setting
    )


def against(ask: Ask, rate: str, _: Deadline) -> Measured:
    """The lower end of the 95% interval of DDP's time over comm.auto's."""
    contest = ask()
    result = contest.store.get(of := spec(contest, rate))
    dense, auto = (stretches(logs, of.turn) for logs in result["logs"])
    pairs = Paired(tuple(a / b for a, b in zip(dense, auto, strict=True)), median(dense), median(auto))
    return Measured(pairs.interval[0], f"{pairs}; {result['logs'][1][0]['said']}")


def predicted(ask: Ask, rate: str, _: Deadline) -> Measured:
    """How far the predicted step time is off, in parts."""
    contest = ask()
    logs = contest.store.get(spec(contest, rate))["logs"][1]
    real = step_seconds(logs, TURN)
    said = fmean(log["facts"]["predicted_step_seconds"] for log in logs)
    return Measured(abs(said / real - 1), f"predicted {said:.3f} s, measured {real:.3f} s; {logs[0]['said']}")


def rows(ask: Ask) -> list[Bar]:
    """All bars of this module."""
    bars = []
    for rate in RATES:
        short, words = named(rate)
        what = f"DDP's step time over comm.auto's at {words}: lower 95% bound of {rounds_at(rate)} paired ratios"
        bars.append(
            Bar(f"comm.auto-{short}", what, ">=", 0.97, measure=partial(against, ask, rate), baseline="DDP fp32")
        )
        what = f"step time that comm.auto predicts at {words}: how far it is off, in parts"
        bars.append(Bar(f"comm.predicted-{short}", what, "<=", 0.15, measure=partial(predicted, ask, rate)))
    return bars
