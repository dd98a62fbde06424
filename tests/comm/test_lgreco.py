"""A setting for each layer: the best there is, alike on all ranks, and nothing lost when it changes."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring import comm
from shoestring.comm.codec import Codec, Grads, Make, Turn
from shoestring.comm.lgreco import MENU, OWN, LGreco, cheapest, planned
from shoestring.comm.powersgd import PowerSGD, resized
from shoestring.comm.rehearsal import rehearse
from shoestring.core.errors import ConfigError

RANKS = 3
SHAPES = {"bias": (40,), "easy": (48, 40), "empty": (0, 3), "hard": (40, 48), "tail": (60, 30)}
MAKES = [
    partial(PowerSGD, 4),
    partial(PowerSGD, 4, alternate=True),
]


def gradients(step: int, ranks: int = RANKS) -> list[Grads]:
    """One matrix of rank 1 with few large entries, one of no structure and small, and one between them."""
    draw = torch.Generator().manual_seed(0)
    column, row = (torch.randn(n, 1, generator=draw) ** 5 for n in (48, 40))
    base = {"easy": column @ row.t(), "tail": torch.randn(60, 30, generator=draw) ** 5}
    own = torch.Generator().manual_seed(step + 1)
    noise = {"bias": 0.1, "easy": 0.01, "empty": 1.0, "hard": 0.3, "tail": 3.0}
    return [
        {name: base.get(name, 0) + noise[name] * torch.randn(shape, generator=own) for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def made(make: Make, budget: float = 0, every: int = 5, ranks: int = RANKS) -> list[LGreco]:
    return [LGreco(make, budget, every=every) for _ in range(ranks)]


def mean(tensors) -> torch.Tensor:
    return torch.stack(list(tensors)).mean(0)


def owed(codecs: list[LGreco], name: str) -> torch.Tensor:
    return mean(codec.inner.state.get("residual", {}).get(name, torch.zeros(SHAPES[name])) for codec in codecs)


# -- the solver -------------------------------------------------------------------------------------------------------


def table(layers: int, settings: int):
    row = st.lists(st.integers(0, 30), min_size=settings, max_size=settings)
    return st.lists(row, min_size=layers, max_size=layers)


def oracle(cost: np.ndarray, weight: np.ndarray, limit: float) -> float:
    """The least cost of all choices within the limit, by trying all."""
    layers, count = cost.shape
    sums = [
        sum(cost[layer, which] for layer, which in enumerate(choice))
        for choice in product(range(count), repeat=layers)
        if sum(weight[layer, which] for layer, which in enumerate(choice)) <= limit
    ]
    return min(sums, default=math.inf)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 90))
@settings(max_examples=120, deadline=None)
def test_of_whole_numbers_it_finds_the_optimum(data, layers, count, limit):
    cost, weight = (np.array(data.draw(table(layers, count)), float) for _ in range(2))
    chosen, optimum = cheapest(cost, weight, limit, bins=max(limit, 1)), oracle(cost, weight, limit)
    if chosen is None:
        assert optimum == math.inf
        return
    assert sum(weight[layer, which] for layer, which in enumerate(chosen)) <= limit
    assert sum(cost[layer, which] for layer, which in enumerate(chosen)) == optimum


@given(seed=st.integers(0, 2**20), layers=st.integers(1, 5), bins=st.sampled_from([20, 100, 10_000]))
@settings(max_examples=60, deadline=None)
def test_of_others_it_misses_no_more_than_rounding_takes(seed, layers, bins):
    draw = np.random.default_rng(seed)
    cost, weight = draw.random((2, layers, 4))
    limit = layers / 2
    chosen = cheapest(cost, weight, limit, bins)
    lowered = oracle(cost, weight, limit * (1 - layers / bins))
    if chosen is None:
        assert lowered == math.inf
        return
    assert sum(weight[layer, which] for layer, which in enumerate(chosen)) <= limit * (1 + 1e-12)
    assert sum(cost[layer, which] for layer, which in enumerate(chosen)) <= lowered + 1e-12


def test_without_a_budget_it_leaves_out_no_more_in_fewer_bytes():
    draw = np.random.default_rng(0)
    prices = np.array(MENU) * draw.random((30, 1)) * 1000
    errors = draw.random((30, 1)) * np.array(MENU) ** -(2 * draw.random((30, 1)))
    chosen = planned(errors, prices, 0)
    rows = np.arange(30)
    assert errors[rows, chosen].sum() <= errors[:, OWN].sum()
    assert prices[rows, chosen].sum() < 0.9 * prices[:, OWN].sum()
    assert planned(np.zeros((3, len(MENU))), prices[:3], 0) == [0, 0, 0]  # nothing is left out by any


def test_a_budget_that_does_not_carry_the_least_is_refused():
    with pytest.raises(ConfigError, match="does not carry 200"):
        planned(np.ones((2, len(MENU))), np.full((2, len(MENU)), 100.0), 150)


# -- the codec --------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_best_matrices_of_each_rank():
    """By singular values, far enough from each other that a warm iteration finds them, in double precision."""
    draw = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, 16, generator=draw, dtype=torch.float64)).Q for n in (60, 50))
    sigma = torch.tensor([4.0, 2.5, 1.4, 0.8, *[0.01] * 12], dtype=torch.float64)
    M = (U * sigma @ V.t()).float()
    errors = made(partial(PowerSGD, 2))[0]._errors({"w": M}) ** 2
    best = torch.tensor([float((sigma[rank:] ** 2).sum()) for rank in (1, 1, 2, 4, 8)])  # half a rank is one
    assert (errors >= best - 1e-5).all()
    assert (errors <= 1.5 * best + 1e-2).all()


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("budgeted", [False, True])
def test_nothing_is_lost_and_ranks_stay_alike(make, budgeted):
    warm = [make() for _ in range(RANKS)]
    whole = sum(rehearse(warm, gradients(step), step).sent(RANKS) for step in range(2)) / 2
    budget = 0.6 * whole if budgeted else 0
    codecs = made(make, budget)
    total, sent = ({name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    travelled = []
    for step in range(17):
        grads = gradients(step)
        for name in SHAPES:
            total[name] += mean(each[name] for each in grads)
        travelled.append(rehearse(codecs, grads, step).sent(RANKS))
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)
            sent[name] += grads[0][name]
    for start in range(1, 16, 5):  # between measurements; of two steps, whose halves of the iteration differ
        assert sum(travelled[start : start + 2]) <= 2 * (budget or whole)
    for codec in codecs:
        assert codec.inner.scales == codecs[0].inner.scales
        torch.testing.assert_close(codec.state, codecs[0].state, rtol=0, atol=0)
    assert len(set(codecs[0].inner.scales.values())) > 1
    for name in SHAPES:
        torch.testing.assert_close(sent[name] + owed(codecs, name), total[name], rtol=1e-4, atol=1e-3)


def test_at_equal_bytes_less_is_left_out_than_by_one_setting_for_all():
    """Of fresh gradients by warm codecs: the errors that were predicted are those that come."""
    make = MAKES[0]
    plain: list[Codec] = [make() for _ in range(RANKS)]
    budget = rehearse(plain, gradients(0)).sent(RANKS)
    graded, left, sent = made(make, budget), dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
    rehearse(graded, gradients(0))
    for step in range(1, 5):
        truth = {name: mean(each[name] for each in gradients(step)) for name in SHAPES}
        for key, codecs in (("a", plain), ("b", graded)):
            inner = [codec.inner if isinstance(codec, LGreco) else codec for codec in codecs]
            for codec in inner:
                for residual in codec.state["residual"].values():
                    residual.zero_()
            grads = gradients(step)
            sent[key] += rehearse(codecs, grads, step).sent(RANKS)
            left[key] += sum(float(((grads[0][name] - truth[name]) ** 2).sum()) for name in SHAPES)
    assert sent["b"] <= 1.02 * sent["a"]
    assert left["b"] < 0.8 * left["a"]


@pytest.mark.parametrize("make", MAKES)
def test_state_is_untouched_until_the_first_answers(make):
    codecs = made(make)
    for step in range(8):
        rehearse(codecs, gradients(step), step)
    for step in (10, 11):
        before = copy.deepcopy(codecs[0].state_dict())
        coding = codecs[0].code(gradients(step)[0], Turn(0, RANKS, step))
        next(coding)
        coding.close()
        torch.testing.assert_close(codecs[0].state_dict(), before, rtol=0, atol=0)
        rehearse(codecs, gradients(step), step)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("stop", [6, 8])
def test_goes_on_after_a_restart_as_if_there_was_none(make, stop):
    codecs, others = made(make), made(make)
    for step in range(stop):
        rehearse(codecs, gradients(step), step)
    for codec, other in zip(codecs, others, strict=True):
        other.load_state_dict(copy.deepcopy(codec.state_dict()))
    for step in range(stop, stop + 6):
        one, two = gradients(step), gradients(step)
        rehearse(codecs, one, step)
        rehearse(others, two, step)
        assert all(torch.equal(one[0][name], two[0][name]) for name in SHAPES)
    assert len(set(others[0].inner.scales.values())) > 1


@pytest.mark.parametrize("make", MAKES)
def test_merged_conserves_and_goes_on(make):
    codecs = made(make)
    for step in range(7):
        rehearse(codecs, gradients(step), step)
    before, fewer = {name: owed(codecs, name) for name in SHAPES}, codecs[:2]
    state = codecs[0].merged([codec.state_dict() for codec in codecs])
    for codec in fewer:
        codec.load_state_dict(state)
    for step in range(7, 12):
        grads = gradients(step, ranks=2)
        expected = {name: mean(each[name] for each in grads) + before[name] for name in SHAPES}
        rehearse(fewer, grads, step)
        assert bool(fewer[0].inner.scales) == (step > 10)  # bytes are others now: errors are measured anew
        before = {name: owed(fewer, name) for name in SHAPES}
        for name in SHAPES:
            torch.testing.assert_close(grads[0][name] + before[name], expected[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make", MAKES)
def test_parts_of_a_step_have_one_plan(make):
    codecs, whole = made(make), made(make)
    names = list(SHAPES)
    for step in range(8):
        together = gradients(step)
        parts = [[{name: g[name] for name in some} for g in gradients(step)] for some in (names[3:], names[:3])]
        for part in parts:
            rehearse(codecs, part, step)
        rehearse(whole, together, step)
    assert codecs[0].inner.scales.keys() == set(SHAPES)
    assert len(set(codecs[0].inner.scales.values())) > 1


def test_what_is_not_finite_shows_when_it_measures():
    grads = gradients(0)[0]
    grads["hard"][3, 3] = math.inf
    *_, errors = next(made(MAKES[0])[0].code(grads, Turn(0, RANKS, 0)))
    assert not errors.tensor.isfinite().all()


def test_a_basis_of_another_rank_keeps_what_it_has():
    basis, draw = torch.randn(4, 30) * 1e-3, torch.Generator()
    assert torch.equal(resized(basis, 2, draw), basis[:2])
    assert resized(basis, 4, draw) is not None
    more = resized(basis, 7, draw)
    assert torch.equal(more[:4], basis)
    assert 0.5e-3 < float(more[4:].std()) < 2e-3


def test_codecs_without_grades_are_refused():
    assert not comm.Dense.graded
    assert {each for each in comm.__all__ if getattr(getattr(comm, each), "graded", False)} == {"PowerSGD"}
    assert isinstance(comm.PowerSGD(select="lgreco").selecting(), LGreco)
    assert PowerSGD.graded
