"""The schedule of prompts and the queue: no pass is over its budget, nobody waits without bound, and short requests and
quiet clients are served first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.decode.request import Request, Row
from shoestring.decode.schedule import SMALLEST, TURNS, TokenBudget, Unread, plan_pass
from shoestring.decode.waiting import Waiting

PROMPTS = st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=12)


def seated(prompts, order):
    """Rows in slots; `order` shuffles slots against age."""
    slots = order.sample(range(len(prompts) + 3), len(prompts))
    return [Unread(slot, tokens, alone) for slot, (tokens, alone) in zip(slots, prompts, strict=True)]


@given(prompts=PROMPTS, order=st.randoms(), budget=st.integers(1, 200), skipped=st.integers(0, TURNS))
def test_a_pass_is_within_its_budget_and_reads_something_of_each_of_its_rows(prompts, order, budget, skipped):
    unread = seated(prompts, order)
    counts = plan_pass(unread, budget, skipped).counts
    left = {row.slot: row.tokens for row in unread}
    assert all(1 <= count <= left[slot] for slot, count in counts.items())
    assert (max(counts) - min(counts) + 1) * max(counts.values()) <= budget
    alone = {row.slot for row in unread if row.alone}
    assert len(counts) == 1 or not alone & counts.keys()


@given(prompts=PROMPTS, order=st.randoms(), budget=st.integers(1, 64), tail=st.integers(1, 30))
def test_the_oldest_prompt_ends_in_bounded_time_however_many_short_ones_come(prompts, order, budget, tail):
    unread, skipped, passes = seated(prompts, order), 0, 0
    oldest, bound = unread[0].slot, (TURNS + 1) * -(-unread[0].tokens // budget)
    while unread and unread[0].slot == oldest:
        passes += 1
        assert passes <= bound
        counts, skipped = plan_pass(unread, budget, skipped)
        left = [row._replace(tokens=row.tokens - counts.get(row.slot, 0)) for row in unread]
        # Each slot that becomes free gets a new short prompt at once.
        unread = [row for row in left if row.tokens]
        unread += [Unread(row.slot, tail) for row in left if not row.tokens and row.slot != oldest]


@given(longs=st.integers(1, 7), tokens=st.integers(100, 10_000), budget=st.integers(16, 100), phase=st.integers(0, 40))
def test_a_short_prompt_is_read_within_three_passes_beside_long_ones(longs, tokens, budget, phase):
    """One for a prompt that is nearly read, one for the oldest one, and its own."""
    unread, skipped = [Unread(slot, tokens) for slot in range(longs)], 0

    def step(unread, skipped):
        counts, skipped = plan_pass(unread, budget, skipped)
        left = [row._replace(tokens=row.tokens - counts.get(row.slot, 0)) for row in unread]
        return [row for row in left if row.tokens], skipped

    for _ in range(phase):
        if unread:
            unread, skipped = step(unread, skipped)
    unread = [*unread, Unread(longs, 16)]
    for _ in range(3):
        if unread:
            unread, skipped = step(unread, skipped)
    assert longs not in {row.slot for row in unread}


def test_prompts_of_about_one_length_share_a_pass_and_a_long_one_does_not_join():
    assert plan_pass([Unread(slot, 19) for slot in range(8)], 512, 0) == (dict.fromkeys(range(8), 19), 0)
    # Alone, the short prompt ends as well, but together more is read.
    assert plan_pass([Unread(0, 3), Unread(1, 19), Unread(2, 19)], 16, 0) == ({0: 3, 1: 5, 2: 5}, 0)
    assert plan_pass([Unread(0, 4000), Unread(1, 16)], 16, 0) == ({1: 16}, 1)
    assert plan_pass([Unread(0, 4000), Unread(1, 16)], 16, TURNS) == ({0: 16}, 0)
    assert plan_pass([Unread(0, 4000), Unread(1, 3)], 16, 1) == ({0: 8, 1: 3}, 2)  # part of the oldest is not enough


# -- the budget --------------------------------------------------------------------------------------------------------


def settled_budget(seconds_of, largest=512, limit=0.1, passes=3000):
    budget, used = TokenBudget(largest, limit), []
    for _ in range(passes):
        used.append(budget.tokens)
        budget.learn(budget.tokens, seconds_of(budget.tokens))
    return used


@pytest.mark.parametrize(
    ("a_token", "wanted"), [(1e-6, 512), (0.1 / 512, 512), (0.1 / 64, 64), (0.1 / 16, 16), (1.0, 16)]
)
def test_the_budget_settles_on_the_largest_pass_within_the_time(a_token, wanted):
    used = settled_budget(lambda tokens: a_token * tokens)
    assert used[-1] == wanted
    assert used.count(wanted) > 0.95 * len(used)


def test_a_jump_in_the_time_of_a_pass_is_tried_rarely():
    """As where another kernel takes over: 16 tokens take 0.04 s, 17 take 0.4 s."""
    used = settled_budget(lambda tokens: 0.04 if tokens <= 16 else 0.4)
    assert used.count(16) >= len(used) - 6


def test_a_budget_without_a_limit_is_the_largest_and_never_below_one_token():
    assert TokenBudget(512).tokens == 512
    assert TokenBudget(3, 0.1).tokens == 3
    budget = TokenBudget(7, 0.1)
    for seconds in (9.0, 0.0, 9.0, 0.0):
        budget.learn(budget.tokens, seconds)
        assert 1 <= budget.tokens <= 7
    assert SMALLEST == 16


# -- the queue ---------------------------------------------------------------------------------------------------------


def row(tokens, client=""):
    return Row(Request(tokens=[0] * tokens, max_new=1, client=client), [0] * tokens)


def drained(waiting):
    """All rows in the order in which they get slots, each charged for its prompt."""
    rows = []
    while (taken := waiting.take()) is not None:
        rows.append(taken)
        waiting.charge(taken.request.client, len(taken.history))
    return rows


ARRIVALS = st.lists(st.tuples(st.integers(1, 100), st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=60)


@given(arrivals=ARRIVALS)
def test_every_row_is_taken_once_and_is_overtaken_only_while_its_client_is_served_its_length(arrivals):
    waiting, taken, came, totals = Waiting(), [], {}, dict.fromkeys("abc", 0)

    def take():
        if (first := waiting.take()) is None:
            return
        client, length = first.request.client, len(first.history)
        taken.append(first)
        for other in waiting:
            if other.request.client == client:
                assert came[first] + length <= came[other] + len(other.history)
        waiting.charge(client, length)
        totals[client] += length

    for length, client, takes in arrivals:
        new = row(length, client)
        came[new] = totals[client]
        waiting.add(new)
        for _ in range(takes):
            take()
    while len(waiting):
        take()
    assert sorted(map(id, taken)) == sorted(map(id, came))
    assert waiting.take() is None
    assert len(waiting.served) <= 3


@given(floods=st.lists(st.integers(1, 50), min_size=20, max_size=60), quiet=st.lists(st.integers(1, 50), min_size=1))
def test_clients_that_wait_are_served_the_same_number_of_tokens(floods, quiet):
    waiting = Waiting()
    for length in floods:
        waiting.add(row(length, "flood"))
    for length in quiet:
        waiting.add(row(length, "quiet"))
    served = {"flood": 0, "quiet": 0}
    for taken in drained(waiting):
        left = {other.request.client for other in waiting}
        served[taken.request.client] += len(taken.history)
        if len(left) == 2:
            assert abs(served["flood"] - served["quiet"]) <= 50


def test_a_client_that_was_away_has_saved_nothing_up():
    waiting = Waiting()
    for _ in range(10):
        waiting.add(row(10, "busy"))
        drained(waiting)
    for _ in range(4):
        waiting.add(row(10, "new"))
        waiting.add(row(10, "busy"))
    assert {taken.request.client for taken in drained(waiting)[:3]} == {"new", "busy"}


def test_short_prompts_go_first_among_those_of_one_client_until_the_long_one_has_waited_its_length():
    waiting = Waiting()
    long = row(100)
    waiting.add(long)
    order = []
    for _ in range(20):
        waiting.add(row(10))
        order.append(waiting.take())
        waiting.charge("", len(order[-1].history))
    assert order.index(long) == 9


def test_rows_that_do_not_suit_keep_their_places_and_others_leave_the_queue():
    waiting, long, short, other = Waiting(), row(100), row(5), row(7)
    for new in (long, short, other):
        waiting.add(new)
    assert waiting.take(lambda candidate: len(candidate.history) > 50) is long
    waiting.remove(short)
    assert list(waiting) == [other]
    assert drained(waiting) == [other]
    assert not waiting
