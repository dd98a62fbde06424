"""Bars of comm.auto: never slower than DDP, a step takes what it said, and so does a run to a loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean, median

from benchmarks.comm.contest import Contest
from benchmarks.comm.curves import step_seconds, stretches
from benchmarks.comm.efficiency import Ask
from benchmarks.comm.families import FOUR_BITS, SIGNS
from benchmarks.comm.methods import DDP, ours
from benchmarks.comm.spec import Spec
from benchmarks.harness import Bar, Deadline, Measured, Paired

RATES = ("50mbit", "100mbit", "1gbit", "")
AUTO = ours("comm.auto", "Auto")
ROUNDS, TURN = 12, 2
FAST = ("1gbit", "")
"""Where a step takes under a second, so that twice as many rounds can be had."""


LISTED = {
    "quantize(bits=4, rounding='nearest', feedback=True)": FOUR_BITS,
    "localsgd(every=4, fragments=4, delay=1, codec='sign')": SIGNS,
}
"""What comm.auto may choose from, and the contest's method that is the same."""
AUTO_LISTED = replace(ours("comm.auto, local steps too", "Auto", allow=list(LISTED)), ddp=False)
LISTED_RATE = "10mbit"


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
    return Measured(pairs.interval[0], f"{pairs}; {result['logs'][1][0]['said']}", pairs.interval)


def predicted(ask: Ask, rate: str, _: Deadline) -> Measured:
    """How far the predicted step time is off, in parts."""
    contest = ask()
    logs = contest.store.get(spec(contest, rate))["logs"][1]
    real = step_seconds(logs, TURN)
    said = fmean(log["facts"]["predicted_step_seconds"] for log in logs)
    return Measured(abs(said / real - 1), f"predicted {said:.3f} s, measured {real:.3f} s; {logs[0]['said']}")


def listed_spec(contest: Contest) -> Spec:
    """A few steps of comm.auto that may take local steps; the links are slow from the start."""
    return Spec(
        methods=(AUTO_LISTED,),
        turn=8,
        rate=LISTED_RATE,
        slow_first=True,
        horizon=contest.sizes.steps,
        setting=contest.sizes.setting,
    )


def time_to_loss(ask: Ask, _: Deadline) -> Measured:
    """How far the predicted time to DDP's loss at the last mark is off that of the contest's same method, in parts."""
    contest = ask()
    log = contest.store.get(listed_spec(contest))["logs"][0][0]
    said, facts = log["said"], log["facts"]
    method = next(method for call, method in LISTED.items() if said.startswith(call))
    figure = contest.figure(contest.tuned(method), LISTED_RATE)
    mark = contest.sizes.steps
    needed = figure.needed(mark)
    real = figure.pace.elapsed(needed)
    predicted = mark / facts["predicted_worth"] * facts["predicted_step_seconds"]
    note = (
        f"predicted {predicted:.0f} s ({facts['predicted_step_seconds']:.3f} s a step, worth "
        f"{facts['predicted_worth']:.2f}), measured {real:.0f} s ({real / needed:.3f} s, {mark / needed:.2f}); {said}"
    )
    return Measured(abs(predicted / real - 1), note)


def rows(ask: Ask) -> list[Bar]:
    """All bars of this module."""
    what = f"time to DDP's last loss that comm.auto predicts at {named(LISTED_RATE)[1]}: how far it is off, in parts"
    bars = [Bar("comm.predicted-loss-10", what, "<=", 0.15, measure=partial(time_to_loss, ask))]
    for rate in RATES:
        short, words = named(rate)
        what = f"DDP's step time over comm.auto's at {words}: lower 95% bound of {rounds_at(rate)} paired ratios"
        bars.append(
            Bar(f"comm.auto-{short}", what, ">=", 0.97, measure=partial(against, ask, rate), baseline="DDP fp32")
        )
        what = f"step time that comm.auto predicts at {words}: how far it is off, in parts"
        bars.append(Bar(f"comm.predicted-{short}", what, "<=", 0.15, measure=partial(predicted, ask, rate)))
    return bars
