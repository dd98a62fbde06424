"""Each rank chooses its own layers: nothing is lost, the budget holds, and all ranks have the same averages."""

from __future__ import annotations

import copy
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ranks import Contract, assert_conserves, assert_merging_conserves

from shoestring import comm
from shoestring.comm.codecs.codec import ExchangeContext, Grads, advance
from shoestring.comm.codecs.lockstep import answer_all, run_lockstep
from shoestring.comm.selection.budget import Selector, Uniform, choose_fitting
from shoestring.comm.selection.hypernetwork import Hypernetwork
from shoestring.comm.selection.knapsack import GainKnapsack
from shoestring.comm.selection.per_node import LayerPiece, PerNodeCodec, admit
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of

RANKS = 3
SHAPES = {f"blocks.{i}.{kind}": shape for i in range(4) for kind, shape in {"w": (32, 40 + i), "b": (33,)}.items()}
WHOLE = sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 4 * 2 * (RANKS - 1) / RANKS
BUDGET = 0.4 * WHOLE


def gradients(step: int, ranks: int = RANKS) -> list[Grads]:
    """A rank's gradients are large in layers of its own, so that ranks choose differently."""
    draw = torch.Generator().manual_seed(step)
    return [
        {
            name: 4.0 ** (((index // 2) - rank) % ranks == 0) * torch.randn(shape, generator=draw)
            for index, (name, shape) in enumerate(SHAPES.items())
        }
        for rank in range(ranks)
    ]


def made(
    budget: float = BUDGET, ranks: int = RANKS, selector: type[Selector] = Hypernetwork, dtype=torch.float32
) -> list[PerNodeCodec]:
    draws = [{"seed": rank} if selector is Uniform else {} for rank in range(ranks)]
    return [PerNodeCodec(budget, selector=selector(**each), dtype=dtype) for each in draws]


def residuals(codecs: list[PerNodeCodec], name: str) -> torch.Tensor:
    return torch.stack([codec.state["residual"][name].double() for codec in codecs]).mean(0)


def sent(codec: PerNodeCodec) -> dict[str, torch.Tensor]:
    """What this rank sent in the last exchange, by name, zero elsewhere."""
    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for piece, entries in codec.state["delivered"].items():
        name, _, span = piece.rstrip("]").partition("[")
        start, stop = map(int, span.split(":"))
        found[name].view(-1)[start:stop] = entries
    return found


SELECTORS = [Hypernetwork, Uniform, pytest.param(GainKnapsack, marks=pytest.mark.slow)]


# -- against the sum of what every rank sent --------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_average_is_of_what_each_rank_sent_and_the_rest_stays(selector):
    codecs, unlike, partial = made(selector=selector), 0, 0
    before = {name: torch.zeros(RANKS, *shape) for name, shape in SHAPES.items()}
    for step in range(12):
        grads = gradients(step)
        M = {name: before[name] + torch.stack([each[name] for each in grads]) for name in SHAPES}
        run_lockstep(codecs, grads, step)
        own = [sent(codec) for codec in codecs]
        for name in SHAPES:
            went = torch.stack([each[name] for each in own])
            torch.testing.assert_close(grads[0][name], went.sum(0) / RANKS, rtol=1e-6, atol=1e-6)
            left = torch.stack([codec.state["residual"][name] for codec in codecs])
            assert torch.equal(left + went, M[name])
            assert torch.equal(left * went, torch.zeros_like(left))  # whole entries, or nothing of them
            some = [bool(each[name].any()) for each in own]
            unlike += len(set(some)) > 1
            before[name] = left
        partial += any(len(codec.state["delivered"]) < 8 for codec in codecs)
    assert unlike > 5 and partial > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_lost_by_what_the_wire_rounds(dtype):
    codecs = made(selector=Uniform, dtype=dtype)
    total, there = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(10):
        grads = gradients(step)
        for name in SHAPES:
            there[name] += torch.stack([each[name].double() for each in grads]).mean(0)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            total[name] += grads[0][name].double()
            torch.testing.assert_close(total[name] + residuals(codecs, name), there[name], rtol=1e-5, atol=1e-5)


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("share", [0.1, pytest.param(0.4, marks=pytest.mark.slow)])
def test_the_budget_holds_over_any_window(selector, share):
    """0.1: less than the price of a matrix, which travels in pieces."""
    budget, went, seen = share * WHOLE, [], dict.fromkeys(SHAPES, 0)
    codecs = made(budget, selector=selector)
    for step in range(60):
        grads = gradients(step)
        went.append(run_lockstep(codecs, grads, step).sent(RANKS))
        for name in SHAPES:
            seen[name] += bool(grads[0][name].any())
    free = np.array(went[2:])
    sums = np.concatenate([[0], free.cumsum()])
    for start, stop in combinations(range(len(sums)), 2):
        assert sums[stop] - sums[start] <= (1e-9 + stop - start) * budget + budget / 2
    assert free.mean() > 0.6 * budget
    assert min(seen.values()) > 2


class Rarely(Selector):
    """Saves for ten steps, and then sends what fits."""

    def choose(self, layers, notes):
        return ([] if layers.step % 11 else choose_fitting(range(len(layers.price)), layers, patience=0)), notes


def test_bytes_are_saved_up_for_the_largest_piece_and_no_longer():
    codecs = made(0.5 * BUDGET, selector=Rarely)
    went = [run_lockstep(codecs, gradients(step), step).sent(RANKS) for step in range(23)]
    largest = codecs[0]._divide({name: torch.zeros(shape).view(-1) for name, shape in SHAPES.items()}, RANKS)
    price = 2 * 4 * (RANKS - 1) * max(piece.shard for piece in largest)
    for step in (11, 22):
        assert 0.5 * BUDGET < went[step] <= 0.5 * BUDGET + price
        assert went[step - 1] < 100  # masks alone


@given(st.integers(2, 5), st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 300), st.randoms())
@settings(max_examples=50)
def test_what_is_admitted_fits_and_what_most_have_chosen_comes_first(ranks, shards, entries, random):
    pieces = [LayerPiece(str(number), 0, ranks * shard, shard) for number, shard in enumerate(shards)]
    masks = np.array([[random.random() < 0.6 for _ in pieces] for _ in range(ranks)])
    union = admit(masks, pieces, entries, np.array([random.random() for _ in pieces]))
    longest = max(
        sum(p.shard for p, chosen in zip(pieces, mask, strict=True) if chosen and p in union.pieces) for mask in masks
    )
    assert (union.longest, union.total) == (longest, sum(piece.shard for piece in union.pieces))
    assert longest + union.total <= entries
    for mask, own in zip(masks, union.sent, strict=True):
        assert own == [p for p, chosen in zip(pieces, mask, strict=True) if chosen and p in union.pieces]
    votes = masks.sum(0)
    for number, piece in enumerate(pieces):
        if votes[number] and piece not in union.pieces:  # it would not have fitted beside those with as many votes
            others = [p for i, p in enumerate(pieces) if p in union.pieces and votes[i] >= votes[number]]
            beside = max(sum(p.shard for p in [*others, piece] if mask[int(p.name)]) for mask in masks)
            assert beside + sum(p.shard for p in others) + piece.shard > entries


def test_ranks_that_choose_alike_send_what_a_ring_sends():
    pieces = [LayerPiece(str(number), 0, 8, 2) for number in range(6)]
    masks = np.repeat(np.array([[1, 1, 0, 1, 0, 0]], bool), 4, axis=0)
    union = admit(masks, pieces, 12, np.zeros(6))
    assert [piece.name for piece in union.pieces] == ["0", "1", "3"]
    assert union.longest + union.total == 12


@pytest.mark.slow
def test_a_budget_that_does_not_carry_the_masks_is_refused():
    codecs = made(budget=200)
    with pytest.raises(ConfigError, match="is less than twice the"):
        for step in range(3):
            run_lockstep(codecs, gradients(step), step)


# -- equal on all ranks, and over restarts ----------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
def test_averages_are_equal_while_networks_differ(selector):
    codecs = made(selector=selector)
    for step in range(20):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        assert all(torch.equal(grads[0][name], each[name]) for each in grads for name in SHAPES)
        assert len({float(codec.state["carried"]["bytes"]) for codec in codecs}) == 1
    if selector is Hypernetwork:
        assert not torch.equal(codecs[0].state["notes"]["W"], codecs[1].state["notes"]["W"])


@pytest.mark.parametrize("selector", SELECTORS)
def test_continues_after_a_restart_as_if_there_was_none(selector):
    codecs, others = made(selector=selector), made(selector=selector)
    for step in range(8):
        run_lockstep(codecs, gradients(step), step)
    for codec, other in zip(codecs, others, strict=True):
        other.load_state_dict(copy.deepcopy(codec.state_dict()))
    for step in range(8, 14):
        one, two = gradients(step), gradients(step)
        run_lockstep(codecs, one, step)
        run_lockstep(others, two, step)
        assert all(torch.equal(one[0][name], two[0][name]) for name in SHAPES)
    torch.testing.assert_close(codecs[1].state_dict(), others[1].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("yields", [1, 2, 3])
def test_given_up_at_any_yield_it_knows_what_it_knew(yields):
    codecs = made(dtype=torch.bfloat16)
    for step in range(5):
        run_lockstep(codecs, gradients(step), step)
    before = copy.deepcopy([codec.state_dict() for codec in codecs])
    each = zip(codecs, gradients(5), strict=True)
    codings = [codec.code(grads, ExchangeContext(rank, RANKS, 5)) for rank, (codec, grads) in enumerate(each)]
    asked = [advance(coding) for coding in codings]
    for _ in range(yields - 1):
        answers = answer_all(asked)
        asked = [advance(coding, own) for coding, own in zip(codings, answers, strict=True)]
    assert None not in asked
    for coding in codings:
        coding.close()
    torch.testing.assert_close([codec.state_dict() for codec in codecs], before, rtol=0, atol=0)


def test_another_number_of_ranks_or_another_budget_loses_nothing():
    codecs = made()
    for step in range(6):
        run_lockstep(codecs, gradients(step), step)
    expected = {name: residuals(codecs, name) for name in SHAPES}
    state = codecs[0].merge_states([codec.state_dict() for codec in codecs])
    fewer = made(ranks=2)
    for codec in fewer:
        codec.load_state_dict(state)
    for budget in (BUDGET, BUDGET / 5):
        for codec in fewer:
            codec.budget = budget
        grads = gradients(6, ranks=2)
        total = {name: expected[name] + torch.stack([each[name] for each in grads]).mean(0) for name in SHAPES}
        assert run_lockstep(fewer, grads, 6).sent(2) <= 1.5 * budget
        expected = {name: residuals(fewer, name) for name in SHAPES}
        for name in SHAPES:
            torch.testing.assert_close(grads[1][name] + expected[name], total[name], rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def make(request):
    return lambda: PerNodeCodec(4000.0, dtype=request.param, warmup=0)


class TestContract(Contract):
    def test_conserves(self, make):
        assert_conserves(make)

    def test_merging_conserves(self, make):
        assert_merging_conserves(make)


# -- what a rank learns -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_rank_sends_the_layers_that_matter_to_it():
    """Every rank's gradient has a direction of its own in two layers, and is noise elsewhere."""
    shapes = {f"layers.{i}": (48,) for i in range(8)}
    draw, ranks = torch.Generator().manual_seed(3), 2
    ways = [
        {name: torch.randn(48, generator=draw) for name in ("layers.1", f"layers.{4 + rank}")} for rank in range(ranks)
    ]
    codecs = [PerNodeCodec(0.4 * 4 * 48 * 8 + 128) for _ in range(ranks)]
    counts = [dict.fromkeys(shapes, 0) for _ in range(ranks)]
    for step in range(150):
        grads = [
            {name: ways[rank].get(name, 0) + torch.randn(48, generator=draw) for name in shapes}
            for rank in range(ranks)
        ]
        run_lockstep(codecs, grads, step)
        for codec, count in zip(codecs, counts, strict=True):
            for piece in codec.state["delivered"]:
                count[piece.partition("[")[0]] += 1
    for rank, count in enumerate(counts):
        others = [number for name, number in count.items() if name not in ways[rank]]
        assert min(count[name] for name in ways[rank]) > 1.3 * max(others), count


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("feature", "dtype"), [(comm.Dense, torch.float32), (comm.BF16, torch.bfloat16)])
def test_settings_make_it_in_one_part(feature, dtype):
    settings = feature(transport=comm.Transport(select="per-node", kb_per_step=3.0, parts=4))
    codec = settings.make_budgeted_codec()
    assert isinstance(codec, PerNodeCodec) and (codec.budget, codec.dtype) == (3000, dtype)
    assert settings.exchanges == 1
    settings.check(attachments_of(Job(torch.nn.Linear(2, 2))))


@pytest.mark.parametrize(
    "feature",
    [comm.PowerSGD, comm.Quantize, comm.Sign, comm.TernGrad, comm.TopK, comm.RandomK, comm.Selective],
)
def test_codecs_that_need_the_same_layers_on_all_ranks_are_refused(feature):
    said = f"`comm.{feature.__name__.lower()}` needs the same layers on all ranks"
    with pytest.raises(ConfigError, match=said):
        feature(transport=comm.Transport(select="per-node", kb_per_step=3.0)).check(
            attachments_of(Job(torch.nn.Linear(2, 2)))
        )


def test_a_selection_without_a_budget_is_refused():
    with pytest.raises(ConfigError, match="has nothing to select"):
        comm.Dense(transport=comm.Transport(select="per-node")).check(attachments_of(Job(torch.nn.Linear(2, 2))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_of_any_precision_are_exchanged(dtype):
    """The networks see numbers in single precision, whatever the residuals are in."""
    codecs = made()
    for step in range(6):
        grads = [{name: grad.to(dtype) for name, grad in each.items()} for each in gradients(step)]
        run_lockstep(codecs, grads, step)
        assert all(torch.equal(grads[0][name], each[name]) for each in grads for name in SHAPES)
        assert all(grad.isfinite().all() for grad in grads[0].values())
