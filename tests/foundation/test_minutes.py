"""Runs by the clock: the number of steps follows the pace, and learning rates follow it without a jump."""

from __future__ import annotations

import json
import os
import signal
import warnings
from itertools import pairwise

import pytest

from shoestring import optim
from shoestring.cli import main
from shoestring.core.kept import Progress
from shoestring.training.clock import PACE_STEPS, REPLAN, is_worth_it, plan
from tests.small_runs import write_run_file, write_texts
from tests.waiting import until


def rates(shape: str, paces: tuple[float, float], change: int, minutes: float = 1.0) -> list[float]:
    """The factors of a run whose steps take `paces` seconds each, the second from step `change` on."""
    schedule = optim.Schedule(shape=shape, warmup=20, cooldown=0.2, final=0.0)
    progress, clock, factors = Progress(), 0.0, []
    while not progress.done:
        pace = paces[progress.step >= change]
        factors.append(schedule.factor(progress.position, progress.total))
        progress.advance()
        clock += pace
        fitting = max(1, int((60 * minutes - clock) / pace))
        later = progress.step > PACE_STEPS and progress.step % REPLAN == 0 and is_worth_it(progress, fitting)
        if progress.step == PACE_STEPS or later:
            plan(progress, fitting)
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


@pytest.mark.parametrize(
    ("paces", "change", "steps"),
    [((0.1, 0.1), 65, 600), ((0.1, 0.4), 65, 198), ((0.4, 0.1), 65, 405), ((0.1, 0.4), 450, 487)],
)
def test_a_run_takes_about_its_minutes(paces, change, steps):
    assert len(rates("trapezoid", paces, change)) == pytest.approx(steps, rel=0.05)


# -- over several starts ----------------------------------------------------------------------------------------------

SECONDS = 3.0


def rows_of(folder):
    """The steps in metrics.jsonl, by the time that each was written at."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["time"]: row for row in rows if "loss" in row}


def seconds_of(rows):
    return sum(row["step_seconds"] for row in rows.values())


def killed_on_the_way(file, folder, seconds):
    """Train in a child, which is killed once its steps took so long; whether it was, and did not end before."""
    before = rows_of(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        child = os.fork()
    if not child:
        try:
            os._exit(main(["train", str(file)]))
        finally:
            os._exit(99)

    def trained():
        return seconds_of({time: row for time, row in rows_of(folder).items() if time not in before})

    status = []

    def ended():
        number, code = os.waitpid(child, os.WNOHANG)
        status.extend([code] if number else [])
        return bool(number)

    until(lambda: ended() or trained() > seconds, 120)
    if not status:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        assert os.waitstatus_to_exitcode(status[0]) == 0
    return not status


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{"plain": {"every": 20}}, {"tiered": {}}], ids=["plain", "tiered"])
def test_starts_that_are_killed_share_the_minutes_of_one_run(tables, tmp_path):
    run = {
        "data": write_texts(tmp_path / "texts"), "folder": str(tmp_path / "run"), "minutes": SECONDS / 60,
        "resume": "auto",
    }  # fmt: skip
    schedule = {"schedule": {"shape": "cosine", "warmup": 10, "final": 0.0}}
    file = write_run_file(tmp_path / "run.toml", {"run": run, "optim": schedule, "checkpoint": tables})
    seen, kills = {}, 0
    while killed_on_the_way(file, tmp_path / "run", SECONDS / 8):
        kills += 1
        seen |= rows_of(tmp_path / "run")
    seen |= rows_of(tmp_path / "run")
    last = rows_of(tmp_path / "run")
    slowest = max(row["step_seconds"] for row in seen.values())
    assert kills >= 4 and 0.6 * SECONDS < seconds_of(seen) < SECONDS + slowest + 0.3, (kills, seconds_of(seen), slowest)
    rates = [row["lr"] for row in last.values()]
    assert max(abs(b - a) for a, b in pairwise(rates)) < 0.25 * max(rates)
    steps = [row["step"] for row in last.values()]
    assert steps == list(range(1, len(steps) + 1))
