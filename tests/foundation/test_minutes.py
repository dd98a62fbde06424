"""Runs by the clock: the number of steps follows the pace, and learning rates follow it without a jump."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shoestring import optim
from shoestring.core.kept import Progress
from shoestring.train import PACE_STEPS, REPLAN, plan


def rates(shape: str, paces: tuple[float, float], change: int, minutes: float = 1.0) -> list[float]:
    """The factors of a run whose steps take `paces` seconds each, the second from step `change` on."""
    schedule = optim.Schedule(shape=shape, warmup=20, cooldown=0.2, final=0.0)  # pyright: ignore[reportArgumentType]
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
@pytest.mark.parametrize("paces", [(0.1, 0.1), (0.1, 0.4), (0.4, 0.1)], ids=["even", "slower", "faster"])
def test_the_rate_never_jumps_when_the_pace_changes(shape, paces):
    factors = rates(shape, paces, change=65)
    steepest = max(abs(after - before) for before, after in pairwise(factors))
    assert steepest < 0.06, steepest  # the slowest run has some 25 steps to decay in
    assert factors[-1] < 0.1 and max(factors) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("paces", "steps"), [((0.1, 0.1), 600), ((0.1, 0.4), 198), ((0.4, 0.1), 405)])
def test_a_run_takes_about_its_minutes(paces, steps):
    assert len(rates("trapezoid", paces, change=65)) == pytest.approx(steps, rel=0.05)
