"""The automatic draft length against simulated drafters and costs: near the best fixed length, and off in time."""

import random

import pytest

from shoestring.decode.draft_length import DraftLength, PassCost

BATCHED = {1: 1.0} | {m: 1.4 + 0.05 * m for m in range(2, 20)}  # a pass over several tokens is another product
FLAT = {m: 1.0 + 0.01 * m for m in range(1, 20)}


def simulate(acceptance, cost, each, *, tokens=2000, fixed=None, noise=0.0, longest=16, seed=0):
    """Seconds for so many tokens, when position i is accepted with `acceptance(tokens so far)`."""
    draw = random.Random(seed)
    length = DraftLength(longest)
    seconds, made = 0.0, 0
    while made < tokens:
        count = length.choose([0], longest) if fixed is None else fixed
        rate = acceptance(made)
        accepted = next((i for i in range(count) if draw.random() >= rate), count)
        drafting = each * count
        reading = cost[count + 1] * (1 + noise * draw.random())
        seconds += drafting + reading
        made += accepted + 1
        length.learn([0], [count], [accepted], drafting, reading)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("cost", [BATCHED, FLAT], ids=["batched", "flat"])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("each", [0.0, 0.2])
def test_it_comes_near_the_best_fixed_length_and_never_loses_to_plain_decoding(cost, rate, each):
    def seconds(**options):
        return sum(simulate(lambda _: rate, cost, each, seed=seed, **options) for seed in range(3))

    best = min(seconds(fixed=length) for length in range(17))
    automatic = seconds(noise=0.0)
    assert automatic <= 1.07 * best
    assert automatic <= seconds(fixed=0) / 0.97


@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_it_never_loses_to_plain_decoding(rate):
    plain, automatic = (simulate(lambda _: rate, BATCHED, 0.1, fixed=fixed) for fixed in (0, None))
    assert automatic <= plain / 0.97
    assert rate == 0 or automatic <= 0.7 * plain


def test_it_is_not_misled_by_noisy_clocks():
    best = min(simulate(lambda _: 0.8, BATCHED, 0.1, fixed=length, noise=0.5) for length in range(17))
    assert simulate(lambda _: 0.8, BATCHED, 0.1, noise=0.5) <= 1.1 * best


@pytest.mark.slow
def test_it_finds_a_text_that_becomes_easy_and_gives_up_one_that_becomes_hard():
    for rates in ((0.0, 0.95), (0.95, 0.0)):
        ideal = sum(
            min(simulate(lambda _, rate=rate: rate, BATCHED, 0.1, fixed=length, tokens=3000) for length in range(17))
            for rate in rates
        )
        changing = simulate(lambda made, rates=rates: rates[made >= 3000], BATCHED, 0.1, tokens=6000)
        assert changing <= 1.1 * ideal


def test_the_same_measurements_give_the_same_lengths():
    def lengths():
        length, draw = DraftLength(8), random.Random(1)
        for _ in range(200):
            count = length.choose([0, 1], 8)
            length.learn([0, 1], [count] * 2, [draw.randint(0, count)] * 2, 0.1 * count, draw.random() + 1)
            yield count

    assert list(lengths()) == list(lengths())


def test_grades_are_learnt_apart():
    length = DraftLength(8)
    for _ in range(40):
        for grade, good in ((0, False), (3, True)):
            count = length.choose([grade], 8)
            length.learn([grade], [count], [count if good else 0], 0.0, BATCHED[count + 1])
    assert length.choose([0], 8) == 0
    assert length.choose([3], 8) == 8
    assert length.choose([-1], 8) == 0


def test_a_fixed_length_is_taken_where_there_is_room():
    assert DraftLength(16, fixed=5).choose([0], 9) == 5
    assert DraftLength(16, fixed=5).choose([0], 2) == 2
    assert DraftLength(16).choose([0], 0) == 0


def test_costs_between_measured_lengths_are_in_proportion_and_hopeful_beyond():
    cost = PassCost()
    for tokens, seconds in ((1, 1.0), (5, 2.0), (9, 4.0)):
        cost.learn(tokens, 9.0)  # a cold start
        cost.learn(tokens, seconds)
        cost.learn(tokens, seconds)
    table = cost.table(11)
    assert table[0] == 1.0
    assert 1.0 < table[1] <= 2.0
    assert table[4:9] == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert table[9:] == pytest.approx([4.02, 4.04])
