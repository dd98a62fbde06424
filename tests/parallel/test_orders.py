"""The order of passes in a pipeline, and where it is cut: every case of small numbers."""

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.parallel.pipeline.orders import Pass, balanced, orders, read_orders, write_order

CASES = [
    case
    for case in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 8), ("1f1b", "gpipe"), (0, 1, 3), (True, False), (0, -1))
    if case[0] > 1 or case[1] == 1
]


def replayed(every, parts):
    """The passes in an order in which each finds its inputs; fails if the stages wait for each other."""
    queues, done = [list(reversed(order)) for order in every], []
    while any(queues):
        before = len(done)
        for queue in queues:
            while queue:
                one = queue[-1]
                needed = [Pass(one.part, one.micro, False)] if one.backward else []
                other = one.part + (1 if one.backward else -1)
                if other in parts:
                    needed.append(Pass(other, one.micro, one.backward))
                if not {*needed} <= {*done}:
                    break
                done.append(queue.pop())
        assert len(done) > before, queues
    return done


@pytest.mark.slow
def test_each_pass_runs_once_behind_what_it_needs():
    for stages, chunks, micro, schedule, ahead, training, first in CASES:
        every = orders(stages, chunks, micro, schedule, ahead, training, first)
        parts = range(first, stages * chunks)
        done = replayed(every, parts)
        wanted = product(parts, range(micro), (False, True) if training else (False,))
        assert sorted(done) == sorted(Pass(*one) for one in wanted)
        for stage, order in enumerate(every):
            assert {one.part % stages for one in order} == {stage}
            for part, backward in product({one.part for one in order}, (False, True)):
                numbers = [one.micro for one in order if (one.part, one.backward) == (part, backward)]
                assert numbers == sorted(numbers)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b_holds_few_micro_batches_and_gpipe_all(stages, ahead):
    def held(order):
        now = [sum(-1 if one.backward else 1 for one in order[:count]) for count in range(len(order) + 1)]
        return max(now)

    for stage in range(stages):
        assert held(orders(stages, 1, 12, "1f1b", ahead)[stage]) <= (stages - 1 - stage) * (1 + ahead) + 1
        assert held(orders(stages, 1, 12, "gpipe", ahead)[stage]) == 12


def test_interleaved_stages_wait_less():
    """In the time of the simulation: with two parts a stage, a first pass gets through sooner."""

    def first_of_last(chunks):
        order = orders(4, chunks, 4, "1f1b")[3]
        return order.index(next(one for one in order if one.backward))

    assert first_of_last(1) == 1
    assert orders(4, 2, 8, "1f1b")[0][:8] == [Pass(0, n, False) for n in range(4)] + [
        Pass(4, n, False) for n in range(4)
    ]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
def test_cuts_are_the_best_of_all(costs, parts):
    if parts > len(costs):
        with pytest.raises(ValueError, match="do not fill"):
            balanced(costs, parts)
        return
    ours = balanced(costs, parts)
    assert [index for part in ours for index in part] == [*range(len(costs))]
    assert all(ours)
    ends = ((0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), parts - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in ends)
    assert max(sum(costs[index] for index in part) for part in ours) == best


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8), st.integers(1, 4))
def test_cuts_are_where_little_is_sent(items, parts):
    """A part takes as long as what it computes, or as what it sends both ways, whichever is longer."""
    costs, sends = [cost for cost, _ in items], [*(sent for _, sent in items), 7]
    if parts > len(costs):
        return

    def slowest(cut):
        return max(
            max(sum(costs[a:b]), (sends[a] if a else 0) + (sends[b] if b < len(costs) else 0)) for a, b in pairwise(cut)
        )

    ours = balanced(costs, parts, sends)
    ends = ((0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), parts - 1))
    assert slowest((0, *(part.stop for part in ours))) == min(map(slowest, ends))


@pytest.mark.parametrize(("stages", "chunks", "first"), [(2, 1, 0), (3, 2, 0), (4, 1, -1)])
def test_written_orders_are_read_as_they_were(stages, chunks, first):
    every = orders(stages, chunks, 3, "1f1b", 1, first=first)
    assert read_orders(tuple(map(write_order, every)), stages, chunks, first) == every


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("f0.0 b0.0",), "1 orders for 2 stages"),
        (("f0.0 b0.0", "f1.0 c1.0"), "`c1.0` is no pass"),
        (("f0.0 b0.0", "f1.0"), "stage 1 needs each of its 2 passes once: see b1.0"),
        (("f0.0 b0.0", "f1.0 b1.0 b1.0"), "stage 1 needs each of its 2 passes once"),
        (("f0.0 b0.0 f1.0", "b1.0"), "stage 0 needs each of its 2 passes once: see f1.0"),
        (("f0.0 b0.0 f0.1 b0.1", "f1.0 f1.1 b1.0 b1.1"), "the stages wait for each other"),
        (("b0.0 f0.0", "f1.0 b1.0"), "the stages wait for each other"),
        (("f0.0 b0.0 f0.2 b0.2", "f1.0 b1.0 f1.2 b1.2"), "stage 0 needs each of its 6 passes once"),
    ],
)
def test_what_is_no_order_of_all_passes_is_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        read_orders(texts, 2, 1)
