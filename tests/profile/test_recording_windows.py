"""Sampled profiles: estimates without bias, intervals that cover, and a budget that is kept."""

import random
import shutil
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from shoestring.core.errors import ConfigError
from shoestring.core.trace import span
from shoestring.profile import profiled
from shoestring.profile.tree import NodeKind
from shoestring.profile.windows import Spent, Windows

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
natively = pytest.mark.skipif(
    not (shutil.which("c++") and HEADERS.is_file()), reason="needs a C++ compiler and Python's headers"
)


@dataclass
class Program:
    """Three operators, of which the second becomes slower with time and the third comes now and then."""

    cost: float = 0.3
    known: float = 0.4  # of the cost, what recording measures itself
    recording: bool = True
    processor: float = 0.0
    recorded: float = 0.0
    beside: float = 0.0
    true: np.ndarray = field(default_factory=lambda: np.zeros((3, 2)))
    numbers: np.ndarray = field(default_factory=lambda: np.zeros((3, 6)))
    means: np.ndarray = field(default_factory=lambda: np.zeros((3, 3)))

    def pause(self, on):
        self.recording = not on

    def step(self, number, chance):
        calls = np.array([4, 2, int(chance.random() < 0.3)])
        times = calls * np.array([1.0, 1 + number / 500, 5.0]) * np.array([chance.gauss(1, 0.1) for _ in range(3)])
        took = float(times.sum()) / 1000
        self.true += np.stack([calls, times], axis=1)
        if self.recording:
            self.numbers[:, 0] += calls
            self.numbers[:, 1] += times
            self.recorded += took * self.cost * self.known
            took *= 1 + self.cost
        self.processor += took


def run(seed, steps=600, stepping=True, known=0.4, beginning=0.0, **how):
    chance, program = random.Random(seed), Program(known=known)
    windows = Windows(
        lambda: [program],
        program.pause,
        lambda: Spent(program.recorded, program.processor + program.beside, program.beside),
        **{"budget": None, **how},
    )
    program.numbers, windows.random = program.numbers.copy(), random.Random(seed)
    windows.begin()
    program.beside = beginning
    for number in range(steps):
        program.step(number, chance)
        (windows.step if stepping else windows.tick)(program.processor)
    ((totals, variances),) = windows.finish(program.processor)
    return program, windows, totals, variances


@pytest.mark.slow
@pytest.mark.parametrize("stepping", [True, False])
def test_estimates_have_no_bias_and_their_intervals_cover(stepping):
    inside, off = [], []
    for seed in range(150):
        program, _, totals, variances = run(seed, stepping=stepping, share=0.1)
        for node in range(3):
            for column, estimate in ((0, totals[node, 0]), (1, totals[node, 1])):
                error = estimate - program.true[node, column]
                inside.append(abs(error) <= 1.96 * variances[node, column] ** 0.5 + 1e-6)
                off.append(error / program.true[node, column])
    assert np.mean(inside) >= 0.9
    assert abs(np.mean(off)) < 0.02
    assert np.std(off) > 0.005


def test_a_whole_recording_is_exact():
    program, windows, totals, variances = run(0, share=1.0)
    np.testing.assert_allclose(totals[:, :2], program.true)
    assert not variances.any()
    assert windows.recorded == pytest.approx(program.processor, rel=0.02)


@pytest.mark.parametrize("known", [0.15, 0.4, 1.0])
@pytest.mark.parametrize("budget", [0.03, 0.1])
def test_the_share_keeps_a_budget_whatever_recording_knows_of_its_cost(budget, known):
    program, windows, _, _ = run(1, steps=6000, share=1.0, budget=budget, known=known)
    recorded = program.recorded / known
    assert recorded / (program.processor - recorded) == pytest.approx(budget, abs=0.01)
    assert windows.share < 1


def test_a_dear_beginning_is_saved_without_losing_sight_of_what_recording_costs():
    program, windows, _, _ = run(1, steps=400, share=1.0, budget=0.03, beginning=0.05)
    recorded = program.recorded / 0.4
    assert (recorded + program.beside) / (program.processor - recorded) == pytest.approx(0.03, abs=0.005)
    assert len(windows.price.ratios) >= 3


def test_under_a_budget_a_part_is_always_left_out_so_that_steps_can_be_compared():
    for known in (0.1, 1.0):
        _, windows, _, _ = run(2, steps=3000, share=1.0, budget=0.9, known=known)
        assert windows.share == pytest.approx(0.9)
        assert windows.price.loss == pytest.approx(0.3, abs=0.1)


def test_one_window_alone_is_as_uncertain_as_it_is_large():
    program, _, totals, variances = run(0, steps=8, share=0.01)
    assert totals[0, 0] == program.true[0, 0]
    assert variances[0, 0] > 0


@pytest.mark.parametrize(("share", "budget"), [(0.0, None), (1.5, None), (1.0, 0.0), (1.0, 1.0)])
def test_what_is_no_share_is_refused(share, budget):
    with pytest.raises(ConfigError, match="cannot record a share"):
        Windows(list, print, lambda: Spent(0.0, 0.0, 0.0), share, budget)


def train(steps):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        with span("exchange", "wire"):
            loss = net(torch.ones(8, 64)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@natively
def test_a_sampled_profile_counts_all_calls_and_says_its_share():
    train(3)
    with profiled(share=0.1) as result:
        train(1500)
    tree, facts = result.profile.tree, result.profile.facts
    assert facts.steps == 1500
    assert 0.05 < facts.share < 0.4
    assert tree.own.sum() == tree.inclusive[0]
    unsure = (
        4 * float(tree.own_variance[tree.kind != NodeKind.PYTHON].sum()) ** 0.5 / 1e9
    )  # on a busy machine the dozen windows differ more
    off = tree.inclusive[0] / 1e9 + facts.overhead - facts.seconds
    assert abs(off) < max(0.15 * facts.seconds, unsure)
    counts = {}
    for node in range(len(tree)):
        if tree.kind[node] != NodeKind.PYTHON:
            name = tree.names[tree.name[node]]
            counts[name] = counts.get(name, 0) + int(tree.count[node])
    assert counts["aten::linear"] == pytest.approx(3000, rel=0.1)
    assert counts["exchange"] == pytest.approx(1500, rel=0.1)
    links = tree.inclusive[tree.kind == NodeKind.LINK].sum()
    assert links > 0


@natively
def test_steps_are_timed_and_many_are_joined(monkeypatch):
    from shoestring.profile import happenings

    monkeypatch.setattr(happenings, "MOST_STEPS", 16)
    with profiled() as result:
        train(100)
    clock = result.profile.facts.clock
    assert 8 <= len(clock) <= 16
    assert [each.first for each in clock] == [1 + sum(every.steps for every in clock[:n]) for n in range(len(clock))]
    assert sum(each.steps for each in clock) == pytest.approx(99, abs=16)
    assert all(each.longest <= each.seconds for each in clock)
    assert clock[-1].resident > 1 << 20


@pytest.mark.slow
@natively
def test_garbage_collection_is_noted_with_its_line():
    import gc

    with profiled() as result:
        gc.collect()
    noted = result.profile.facts.waits["garbage collection"]
    assert result.profile.facts.unseen == []
    assert noted.count >= 1
    assert noted.seconds >= noted.longest > 0
    assert __file__ in noted.where


@natively
@pytest.mark.slow
def test_recompiles_and_graph_breaks_are_noted():
    def broken(x):
        print("", end="")
        return x + 1

    sized = torch.compile(lambda x: x.sin() + x.shape[0], backend="eager", dynamic=False)
    with profiled() as result:
        for size in (2, 3):
            sized(torch.ones(size))
        torch.compile(broken, backend="eager")(torch.ones(2))
    waits = result.profile.facts.waits
    assert "torch.compile has fused" in result.profile.facts.unseen[0]
    assert any(name.startswith("recompile: ") and "size mismatch" in name for name in waits)
    assert any(name.startswith("graph break: ") and "builtin" in name for name in waits), waits
    assert any(name == "compile: broken" and __file__ in event.where for name, event in waits.items())
