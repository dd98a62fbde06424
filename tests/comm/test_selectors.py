"""Which layers each way of selecting takes, and how the hypernetwork learns."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.selection.budget import BudgetedCodec, Layers, Selector, Uniform
from shoestring.comm.selection.hypernetwork import Hypernetwork, forward, log2, probability, product
from shoestring.comm.selection.knapsack import GainKnapsack, Knapsack, choose_best, choose_exactly


def layers(price, allowance=None, *, step=0, **known) -> Layers:
    price = np.asarray(price, float)
    allowance = price.sum() / 2 if allowance is None else allowance
    blank = {name: np.zeros(len(price)) for name in ("entries", "gradient", "accumulated", "gain", "waited")}
    given_ = {name: np.asarray(value, float) for name, value in known.items()}
    return Layers(step=step, budget=allowance, allowance=allowance, price=price, **(blank | given_))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=9), st.integers(0, 120))
@settings(max_examples=80)
def test_exact_knapsack_is_optimal(items, allowance):
    price, u = (np.array(column, float) for column in zip(*items, strict=True))
    sets = [some for count in range(len(u) + 1) for some in combinations(range(len(u)), count)]
    optimum = max(u[list(some)].sum() for some in sets if price[list(some)].sum() <= allowance)
    chosen = choose_exactly(u, price, allowance)
    assert price[chosen].sum() <= allowance
    assert u[chosen].sum() == optimum


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=15, max_size=18), st.integers(50, 400))
@settings(max_examples=30)
def test_greedy_knapsack_reaches_half_of_the_optimum(items, allowance):
    price, u = (np.array(column, float) for column in zip(*items, strict=True))
    chosen = choose_best(u, layers(price, allowance))
    assert price[chosen].sum() <= allowance
    assert 2 * u[chosen].sum() >= u[choose_exactly(u, price, allowance)].sum()


def test_greedy_knapsack_takes_the_single_layer_that_outweighs_the_rest():
    price, u = np.array([100.0, *[1.0] * 15]), np.array([100.0, *[2.0] * 15])
    assert choose_best(u, layers(price, 100)) == [0]


def test_knapsack_prefers_what_is_owed_most_for_its_bytes():
    known = layers([10, 10, 10, 10], 20, gradient=[1, 4, 1, 3], accumulated=[1, 1, 9, 9], waited=[0, 0, 2, 0])
    assert set(Knapsack().choose(known, {})[0]) == {1, 2}  # the residual of layer 3 has been sent


@pytest.mark.parametrize("count", [4, 20], ids=["exactly", "greedily"])
def test_knapsack_prefers_what_has_waited_longer_among_equals(count):
    waited = np.arange(count) % 4
    known = layers([10] * count, 10 * count // 4, gradient=[1] * count, accumulated=[1] * count, waited=waited)
    assert {waited[layer] for layer in Knapsack().choose(known, {})[0]} == {3}


@pytest.mark.parametrize("count", [4, 20], ids=["exactly", "greedily"])
def test_knapsack_waits_for_a_layer_that_costs_more_than_a_budget(count):
    """Once it comes first nothing else is sent, so that the allowance grows until it can be."""
    known = layers([25] + [4] * count, 10, gradient=[1000] + [1] * count)
    assert Knapsack().choose(known, {})[0] == []
    assert 0 in Knapsack().choose(replace(known, allowance=25.0), {})[0]


def follow(selector: Selector, steps: int = 120) -> tuple[float, dict[str, int]]:
    """SGD after targets of which two of twelve move; the other layers' gradients are noise.

    Returns the mean loss, and how often each layer is sent.
    """
    draw, ranks = torch.Generator().manual_seed(1), 2
    x = {f"layers.{i}": torch.zeros(64 * (1 + i % 4)) for i in range(12)}
    drift = {name: torch.randn(x[name].shape, generator=draw) * 0.3 for name in ("layers.3", "layers.8")}
    budget = 0.35 * 4 * sum(each.numel() for each in x.values())
    codecs = [BudgetedCodec(DenseCodec, selector, budget) for _ in range(ranks)]
    counts, losses = dict.fromkeys(x, 0), 0.0
    for step in range(steps):
        grads = [{n: t + 0.5 * torch.randn(t.shape, generator=draw) for n, t in x.items()} for _ in range(ranks)]
        for each in grads:
            for name in each.keys() - drift.keys():
                each[name] -= x[name]
        run_lockstep(codecs, grads, step)
        for name in x:
            counts[name] += bool(grads[0][name].any())
            x[name] -= 0.4 * grads[0][name]
        for name, each in drift.items():
            x[name] += each
            losses += float((x[name] ** 2).mean()) / steps
    return losses, counts


def test_the_gain_of_a_gradient_is_averaged_for_each_layer():
    """One that waits has one more to send at each step; its gain is that of the choice before the last."""
    selector, notes = GainKnapsack(memory=0.5, least=0.0), {}
    held = []
    for step, (waited, gain) in enumerate([([0, 1], [0, 0]), ([1, 0], [0, 0]), ([2, 0], [3, 8]), ([3, 0], [4, 4])]):
        known = layers([4, 4], 4, gradient=[1, 1], waited=waited, gain=gain)
        held.append(1 + np.array(waited, float))
        before = notes.get("rate", torch.ones(2, dtype=torch.float64)).numpy()
        chosen, notes = selector.choose(known, notes)
        if step >= 2:
            rate = 0.5 * before + 0.5 * np.array(gain) / held[step - 2]
            assert notes["rate"].numpy() == pytest.approx(rate)
            assert chosen == [int(np.argmax(rate * held[step]))]


def test_a_layer_that_raises_the_loss_waits_but_not_for_ever():
    selector, notes, waited, sent = GainKnapsack(), {}, np.zeros(3), set()
    for _ in range(400):
        chosen, notes = selector.choose(layers([4, 4, 4], 4, gradient=[1] * 3, waited=waited, gain=[1, 1, -1]), notes)
        waited += 1
        waited[list(chosen)] = 0
        sent |= set(chosen)
    assert sent == {0, 1, 2}


@pytest.mark.slow
def test_the_gain_finds_which_layers_matter():
    loss, counts = follow(GainKnapsack())
    matter = min(counts.pop("layers.3"), counts.pop("layers.8"))
    assert matter > 1.5 * max(counts.values())
    assert loss < 0.8 * follow(Uniform())[0]


@pytest.mark.slow
def test_the_hypernetwork_learns_which_layers_matter():
    uniform, knapsack = follow(Uniform())[0], follow(Knapsack())[0]
    learnt, counts = follow(Hypernetwork())
    matter = min(counts.pop("layers.3"), counts.pop("layers.8"))
    assert matter > 1.5 * max(counts.values())
    assert learnt < 0.8 * uniform
    assert learnt < knapsack  # which takes noise for a residual


@pytest.mark.parametrize(("saved", "chosen"), [(0, set()), (6, {0})])
def test_the_hypernetwork_continues_saving_for_what_it_began_to_save_for(saved, chosen):
    """Layer 0 costs more than a budget of 10."""
    known = replace(layers([15, 4, 4, 4], 10, entries=np.ones(4)), allowance=10.0 + saved)
    notes = {
        name: torch.from_numpy(value) for name, value in (Hypernetwork()._start() | {"saving": np.array(0)}).items()
    }
    sent, notes = Hypernetwork().choose(known, notes)
    assert set(sent) == chosen
    assert (int(notes["saving"]) == 0) == (not chosen)


def test_the_hypernetwork_climbs_the_gradient_of_its_objective():
    """Against central differences of J = Σ p (v - λ b)."""
    draw = np.random.default_rng(0)
    net = Hypernetwork(rate=1e-6, repeats=1)
    known = layers(draw.random(5), gain=draw.normal(size=5))
    notes = net._start() | {"recent": draw.normal(size=(2, 5, 7)), "price": np.array(0.7)}
    worth = known.gain / np.abs(known.gain).sum() - 0.7 * known.price / known.price.sum()

    def objective(weights) -> float:
        return float((probability(forward(weights, notes["recent"][0])[1]) * worth).sum())

    slopes = {key: np.zeros_like(notes[key]) for key in ("W", "w")}
    for key, slope in slopes.items():
        for index in np.ndindex(slope.shape):
            ends = []
            for sign in (1, -1):
                moved = notes | {key: notes[key].copy()}
                moved[key][index] += sign * 1e-5
                ends.append(objective(moved))
            slope[index] = (ends[0] - ends[1]) / 2e-5
    length = math.sqrt(sum(float((slope**2).sum()) for slope in slopes.values()))
    after = net._learn(notes, known)
    for key, slope in slopes.items():
        np.testing.assert_allclose((after[key] - notes[key]) / 1e-6, slope / length, atol=1e-4)


def test_the_hypernetworks_arithmetic():
    x = np.array([0.25, 1.0, 3.0, 1024.0])
    np.testing.assert_allclose(log2(x), [-2, 0, 1.5, 10])
    A, B = np.random.default_rng(0).normal(size=(2, 5, 5))
    np.testing.assert_allclose(product(A, B), A @ B)


# -- the settings -----------------------------------------------------------------------------------------------------
