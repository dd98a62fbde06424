"""Some layers each step: alike on all ranks, within the budget, and nothing lost."""

from __future__ import annotations

import copy
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from sparse_ranks import totals

from shoestring import comm
from shoestring.comm.codecs.codec import CodecFactory, ExchangeContext, Grads, advance
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.powersgd import PowerSGDCodec
from shoestring.comm.codecs.quantize import QuantizeCodec
from shoestring.comm.selection.budget import BudgetedCodec, Selector, Uniform, measure_price
from shoestring.comm.selection.hypernetwork import Hypernetwork
from shoestring.comm.selection.knapsack import GainKnapsack, Knapsack
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World

RANKS = 3
SHAPES = {f"blocks.{i}.{kind}": shape for i in range(4) for kind, shape in {"w": (32, 40 + i), "b": (32,)}.items()}
WHOLE = sum(math.prod(shape) for shape in SHAPES.values()) * 4 * 2 * (RANKS - 1) / RANKS
TELLING = 2 * (RANKS - 1) / RANKS * 12 * len(SHAPES)
SELECTORS = [Uniform, Knapsack, GainKnapsack, Hypernetwork]


def gradients(step: int, ranks: int = RANKS) -> list[Grads]:
    """Of layers whose gradients differ in length by up to 8, with a part that is common to ranks and steps."""
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(step + 1)
    size = {name: 2.0 ** (index % 4) for index, name in enumerate(SHAPES)}
    base = {name: torch.randn(shape, generator=common) for name, shape in SHAPES.items()}
    return [
        {name: size[name] * (base[name] + torch.randn(shape, generator=own)) for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def mean(tensors) -> torch.Tensor:
    return torch.stack(list(tensors)).mean(0)


def made(
    selector: type[Selector], make: CodecFactory = DenseCodec, budget: float = 0, ranks: int = RANKS
) -> list[BudgetedCodec]:
    whole = sum(measure_price(make, name, torch.zeros(shape), RANKS) for name, shape in SHAPES.items())
    return [BudgetedCodec(make, selector(), budget or 0.4 * whole + TELLING) for _ in range(ranks)]


def feedback() -> QuantizeCodec:
    return QuantizeCodec(4, bucket=64, rounding="nearest", feedback=True)


def unsent(codecs: list[BudgetedCodec], name: str) -> torch.Tensor:
    """The mean over the ranks of what waits here and of what the codec inside has left out."""
    zero = torch.zeros(SHAPES[name])
    both = [(c.state["unsent"], c.inner.state.get("residual", {})) for c in codecs]
    return mean(here.get(name, zero) + inside.get(name, zero) for here, inside in both)


# -- whatever the selector is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("make", [DenseCodec, feedback])
def test_nothing_is_lost(selector, make):
    codecs = made(selector, make)
    sent, total = totals(codecs, gradients, steps=12)
    assert any(codec.state["unsent"] for codec in codecs)
    for name in SHAPES:
        torch.testing.assert_close(sent[name] + unsent(codecs, name), total[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("selector", SELECTORS)
def test_ranks_choose_alike_and_decode_alike(selector):
    codecs, choices = made(selector), set()
    for step in range(50):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        for kind in ("seen", "notes"):
            for name, tensor in codecs[0].state[kind].items():
                assert all(torch.equal(tensor, codec.state[kind][name]) for codec in codecs)
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)
        choices.add(frozenset(name for name in SHAPES if grads[0][name].any()))
    assert len(choices) > 3


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("share", [0.08, pytest.param(0.4, marks=pytest.mark.slow)])
def test_the_budget_holds_over_any_window(selector, share):
    """0.08: less than the price of every matrix, which must be saved for."""
    budget, sent, seen = share * WHOLE + TELLING, [], dict.fromkeys(SHAPES, 0)
    codecs = made(selector, budget=budget)
    for step in range(80):
        grads = gradients(step)
        sent.append(run_lockstep(codecs, grads, step).sent(RANKS))
        for name in SHAPES:
            seen[name] += bool(grads[0][name].any())
    free = np.array(sent[2:])
    largest = max(measure_price(DenseCodec, "", torch.zeros(shape), RANKS) for shape in SHAPES.values())
    sums = np.concatenate([[0], free.cumsum()])
    for start, stop in combinations(range(len(sums)), 2):
        assert sums[stop] - sums[start] <= (stop - start) * budget + largest + 1e-6
    assert free.mean() > 0.75 * budget  # and is used
    assert min(seen.values()) > 2  # all have their turn, the two steps that send everything aside


@pytest.mark.parametrize("selector", SELECTORS)
def test_state_is_untouched_until_the_first_answers(selector):
    codecs = made(selector, feedback)
    for step in range(6):
        run_lockstep(codecs, gradients(step), step)
    before = copy.deepcopy(codecs[0].state_dict())
    coding = codecs[0].code(gradients(6)[0], ExchangeContext(0, RANKS, 6))
    advance(coding)
    coding.close()
    torch.testing.assert_close(codecs[0].state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("selector", SELECTORS)
def test_continues_after_a_restart_as_if_there_was_none(selector):
    codecs = made(selector, feedback)
    for step in range(8):
        run_lockstep(codecs, gradients(step), step)
    others = made(selector, feedback)
    for codec, other in zip(codecs, others, strict=True):
        other.load_state_dict(copy.deepcopy(codec.state_dict()))
    for step in range(8, 12):
        one, two = gradients(step), gradients(step)
        run_lockstep(codecs, one, step)
        run_lockstep(others, two, step)
        assert all(torch.equal(one[0][name], two[0][name]) for name in SHAPES)


@pytest.mark.parametrize("selector", SELECTORS)
def test_merged_conserves_and_continues(selector):
    codecs = made(selector, feedback)
    for step in range(6):
        run_lockstep(codecs, gradients(step), step)
    before = {name: unsent(codecs, name) for name in SHAPES}
    state = codecs[0].merge_states([codec.state_dict() for codec in codecs])
    fewer = made(selector, feedback, ranks=2)
    for codec in fewer:
        codec.load_state_dict(state)
    for name in SHAPES:
        torch.testing.assert_close(unsent(fewer, name), before[name])
    for step in range(6, 9):
        grads = gradients(step, ranks=2)
        expected = {name: mean(each[name] for each in grads) + unsent(fewer, name) for name in SHAPES}
        run_lockstep(fewer, grads, step)
        assert step > 6 or not fewer[0].state["unsent"]  # prices are not known yet: everything is sent
        for name in SHAPES:
            torch.testing.assert_close(grads[0][name] + unsent(fewer, name), expected[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("selector", SELECTORS)
def test_parts_of_a_step_share_its_budget_and_its_choice(selector):
    """As the coordinator calls it: several exchanges a step, of other sets of layers once DDP has rebuilt buckets."""
    budget, names, sent = 0.4 * WHOLE + TELLING, list(SHAPES), []
    codecs, whole = made(selector, budget=budget), made(selector, budget=budget)
    for step in range(20):
        cut = 3 if step < 5 else 5
        grads, together = gradients(step), gradients(step)
        parts = [[{name: g[name] for name in some} for g in grads] for some in (names[cut:], names[:cut])]
        sent.append(sum(run_lockstep(codecs, part, step).sent(RANKS) for part in parts))
        run_lockstep(whole, together, step)
        assert all(torch.equal(grads[0][name], together[0][name]) for name in names)
    assert sum(sent[2:]) <= 18 * budget + WHOLE / 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_even_in_a_layer_that_waits(value):
    codecs = made(Uniform)
    for step in range(5):
        run_lockstep(codecs, gradients(step), step)
    for name in SHAPES:
        grads = gradients(5)[0]
        grads[name].view(-1)[7] = value
        *_, told = advance(codecs[0].code(grads, ExchangeContext(0, RANKS, 5)))
        assert not told.tensor.isfinite().all()


def test_what_could_not_be_used_is_owed_again():
    codecs = made(Uniform)
    for step in range(4):
        run_lockstep(codecs, gradients(step), step)
    delivered, before = torch.ones(32), unsent(codecs, "blocks.0.b")
    for codec in codecs:
        codec.return_to_residual("blocks.0.b", delivered)
    torch.testing.assert_close(unsent(codecs, "blocks.0.b"), before + 1)


def test_half_precision_gradients_leave_fp32_behind():
    codecs = made(Uniform)
    for step in range(6):
        run_lockstep(codecs, [{n: g.bfloat16() for n, g in each.items()} for each in gradients(step)], step)
    assert {tensor.dtype for tensor in codecs[0].state["unsent"].values()} == {torch.float32}


@pytest.mark.parametrize("selector", SELECTORS)
def test_what_is_empty_takes_no_part(selector):
    plain, with_empty = made(selector), made(selector)
    for step in range(6):
        one, other = gradients(step), [{"empty": torch.zeros(0, 4), **each} for each in gradients(step)]
        sent = [run_lockstep(codecs, grads, step) for codecs, grads in ((plain, one), (with_empty, other))]
        assert sent[0] == sent[1]
        assert all(torch.equal(other[0][name], grad) for name, grad in one[0].items())
    run_lockstep(with_empty, [{"empty": torch.zeros(0, 4)} for _ in with_empty], 6)


def test_a_budget_that_does_not_carry_the_statistics_is_refused():
    codecs = made(Uniform, budget=100)
    with pytest.raises(ConfigError, match="is less than"):
        for step in range(3):
            run_lockstep(codecs, gradients(step), step)


def two_steps(make: CodecFactory, name: str, shape: tuple[int, ...], first: int) -> float:
    codecs = [make() for _ in range(RANKS)]
    grads = [[{name: torch.randn(shape)} for _ in codecs] for _ in range(2)]
    return sum(run_lockstep(codecs, grads[i], first + i).sent(RANKS) for i in range(2)) / 2


@pytest.mark.parametrize("make", [DenseCodec, QuantizeCodec, lambda: PowerSGDCodec(2, alternate=True, start=9)])
def test_prices_are_what_travels(make):
    for name, shape in {**SHAPES, "tall": (400, 8)}.items():
        assert measure_price(make, name, torch.zeros(shape), RANKS) == two_steps(make, name, shape, first=9)


# -- each selector ----------------------------------------------------------------------------------------------------


def test_uniform_sends_all_layers_equally_often():
    codecs, counts = made(Uniform, budget=0.3 * WHOLE), dict.fromkeys(SHAPES, 0)
    for step in range(120):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            counts[name] += bool(grads[0][name].any())
    assert max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize(
    ("select", "selector"),
    [
        ("auto", GainKnapsack),
        ("hypernetwork", Hypernetwork),
        ("gain", GainKnapsack),
        ("knapsack", Knapsack),
        ("uniform", Uniform),
    ],
)
def test_a_budget_is_spent_by_a_selector(select, selector):
    codec = comm.Dense(transport=comm.Transport(kb_per_step=3, select=select)).make_budgeted_codec()
    assert isinstance(codec, BudgetedCodec) and type(codec.selector) is selector and codec.budget == 3000


def test_without_a_budget_everything_is_sent():
    assert not isinstance(comm.Dense().make_budgeted_codec(), BudgetedCodec)


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (
            comm.Dense(transport=comm.Transport(select="uniform")),
            '`comm.dense.transport.select = "uniform"` has nothing to select',
        ),
        (
            comm.Dense(transport=comm.Transport(kb_per_step=-1)),
            "`comm.dense.transport.kb_per_step` must be a number of kB, got -1",
        ),
        (comm.DGC(transport=comm.Transport(kb_per_step=3)), "cannot wait for a budget"),
    ],
)
def test_settings_that_cannot_be_are_refused(feature, said):
    with pytest.raises(ConfigError, match=said):
        feature.check(attachments_of(Job(torch.nn.Linear(2, 2))))


@pytest.mark.parametrize("select", ["gain", "per-node"])
def test_a_budget_that_carries_nothing_is_refused_before_the_first_step(select):
    feature = comm.Dense(transport=comm.Transport(kb_per_step=0.03, select=select))
    with pytest.raises(ConfigError, match="a budget of 30 bytes a step is less than"):
        feature.check(attachments_of(Job(torch.nn.Linear(2, 2), world=World(rank=0, size=4, local_size=1))))
    feature.check(attachments_of(Job(torch.nn.Linear(2, 2), world=World())))
