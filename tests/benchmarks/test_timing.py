"""Paired timing: its statistics on known data and planted noise, and whole commands."""

import gc
import random
import sys
from itertools import count

import numpy as np
import pytest

from benchmarks.timing import Paired, commands_cpu_time, paired, paired_commands, run_command
from shoestring.core.errors import ConfigError, WorldError


class Laboratory:
    """A clock that only the work moves: `cost` seconds, times what the machine does to the n-th run."""

    def __init__(self, slowdown):
        self.now, self.run, self.slowdown = 0.0, count(), slowdown

    def work(self, cost):
        def run():
            self.now += cost * self.slowdown(next(self.run))

        return run

    def paired(self, a, b, **more):
        return paired(self.work(a), self.work(b), clock=lambda: self.now, **more)


@pytest.mark.slow
def test_a_quiet_machine_gives_the_planted_ratio_and_its_inverse():
    quiet = Laboratory(lambda n: 1.0).paired(3.0, 2.0)
    assert quiet.median == pytest.approx(1.5)
    assert quiet.interval == pytest.approx((1.5, 1.5))
    assert Laboratory(lambda n: 1.0).paired(2.0, 3.0).median == pytest.approx(1 / 1.5)


@pytest.mark.slow
def test_abba_removes_a_steady_drift_from_every_round():
    growing = Laboratory(lambda n: 1.05**n).paired(1.0, 1.0)
    assert growing.ratios == pytest.approx([1.0] * 12)
    linear = Laboratory(lambda n: 1 + 0.01 * n).paired(1.5, 1.0)
    assert linear.ratios == pytest.approx([1.5] * 12, rel=3e-4)
    pairs = Laboratory(lambda n: 1.05**n).paired(1.0, 1.0, order="AB")
    assert sorted(pairs.ratios) == pytest.approx([1 / 1.05] * 6 + [1.05] * 6)
    assert pairs.median == pytest.approx(1.0)


@pytest.mark.slow
def test_each_follows_itself_as_often_as_the_other():
    turns = []
    paired(lambda: turns.append("A"), lambda: turns.append("B"), rounds=8, warmup=0, clock=count(1).__next__)
    text = "".join(turns)
    assert text == "ABBABAAB" * 4
    first, second = (sum(text[i : i + 2] == pair for i in range(len(text))) for pair in ("AA", "BB"))
    assert abs(first - second) <= 1


@pytest.mark.parametrize(("rounds", "exact"), [(6, 0.969), (12, 0.961), (25, 0.957)])
def test_the_interval_covers_a_planted_ratio_under_heavy_tails(rounds, exact):
    random = np.random.default_rng(7)
    runs = np.exp(random.normal(0, 0.05, (2000, rounds, 4))) * np.where(random.random((2000, rounds, 4)) < 0.1, 3, 1)
    ratios = 1.25 * np.sqrt(runs[..., 0] * runs[..., 3] / (runs[..., 1] * runs[..., 2]))
    intervals = np.array([Paired(tuple(row), 1.0, 1.0).interval for row in ratios])
    covered = np.mean((intervals[:, 0] <= 1.25) & (intervals[:, 1] >= 1.25))
    assert abs(covered - exact) < 0.012  # 2.5 standard errors


def test_the_interval_holds_the_ranks_of_the_sign_test():
    # Conover's table: n=6 ranks 1 and 6, n=9 ranks 2 and 8, n=12 ranks 3 and 10, n=20 ranks 6 and 15
    for n, low, high in [(6, 1, 6), (9, 2, 8), (12, 3, 10), (20, 6, 15)]:
        shuffled = random.Random(n).sample([float(rank) for rank in range(1, n + 1)], n)
        assert Paired(tuple(shuffled), 1.0, 1.0).interval == (low, high)


def test_spread_and_note_of_known_ratios():
    known = Paired((1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0), 0.5, 0.25)
    assert (known.median, known.spread, known.interval) == (pytest.approx(8.0), (3.0, 24.0), (1.0, 64.0))
    assert known.measured().note == (
        "median of 7 paired ratios, 95% interval 1 to 64, quartiles 3 and 24, 0.5 s over 0.25 s"
    )


@pytest.mark.slow
def test_no_garbage_is_collected_while_timing_and_collection_is_on_again_after_an_error():
    states = set()
    paired(lambda: states.add(gc.isenabled()), lambda: None, rounds=6, warmup=0, clock=count().__next__)
    assert states == {False}
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    with pytest.raises(ZeroDivisionError):
        paired(lambda: 1 / 0, lambda: None, warmup=0)
    assert gc.isenabled()


@pytest.mark.slow
def test_too_few_rounds_and_a_clock_that_stands_still_are_refused():
    with pytest.raises(ConfigError, match="5 rounds give no 95% interval"):
        paired(lambda: None, lambda: None, rounds=5)
    with pytest.raises(ConfigError, match="no time on this clock"):
        paired(lambda: None, lambda: None, clock=lambda: 1.0)


@pytest.mark.slow
def test_whole_commands_are_paired(tmp_path):
    note = "import sys; open('log', 'a').write(sys.argv[1])"
    a, b = ([sys.executable, "-S", "-c", note, name] for name in "AB")
    times = paired_commands(a, b, cwd=tmp_path, clock=commands_cpu_time)
    assert (tmp_path / "log").read_text() == "AB" + "ABBA" * 3
    assert len(times.ratios) == 6
    assert times.a_seconds > 0


def test_a_failed_command_says_so():
    with pytest.raises(WorldError, match="exited with 3: the last word"):
        run_command([sys.executable, "-S", "-c", "import sys; print('the last word', file=sys.stderr); sys.exit(3)"])
