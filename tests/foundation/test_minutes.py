"""Runs by the clock: the number of steps follows the pace, and learning rates follow it without a jump."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shoestring import optim
from shoestring.core.kept import Progress
from shoestring.training.loop import PACE_STEPS, REPLAN, plan


def rates(shape: str, paces: tuple[float, float], change: int, minutes: float = 1.0) -> list[float]:
    """The factors of a run whose steps take `paces` seconds each, the second from step `change` on."""
    schedule = optim.Schedule(shape=shape, warmup=20, cooldown=0.2, final=0.0)
    progress, clock, factors = Progress(), 0.0, []
    while not progress.done:
        pace = paces[progress.step >= change]
        factors.append(schedule.factor(progress.position, progress.total))
        progress.advance()
        clock += pace
        planned = progress.step % REPLAN == 0 and 2 * progress.position < progress.total
        if progress.step == PACE_STEPS or planned:
            plan(progress, max(1, int((60 * minutes - clock) / pace)))
    return factors


@pytest.mark.parametrize("shape", ["trapezoid", "cosine"])
@pytest.mark.parametrize(
    ("paces", "change", "most"),
    [
        ((0.1, 0.1), 65, 0.06),
        ((0.1, 0.4), 65, 0.06),
        ((0.4, 0.1), 65, 0.06),
        ((0.1, 1.0), 200, 0.15),  # some ten steps are left to decay in
    ],
    ids=["even", "slower", "faster", "stalls"],
)
def test_the_rate_never_jumps_when_the_pace_changes(shape, paces, change, most):
    factors = rates(shape, paces, change)
    assert max(abs(after - before) for before, after in pairwise(factors)) < most
    assert factors[-1] < 0.15 and max(factors) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("paces", "steps"), [((0.1, 0.1), 600), ((0.1, 0.4), 198), ((0.4, 0.1), 405)])
def test_a_run_takes_about_its_minutes(paces, steps):
    assert len(rates("trapezoid", paces, change=65)) == pytest.approx(steps, rel=0.05)
