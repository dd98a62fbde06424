"""Losses that must not change unnoticed; `python -m tests.golden` writes them anew."""

import json

import pytest
import ranks

GOLDEN = json.loads((ranks.HERE.parent / "golden" / "losses.json").read_text())


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_losses_are_the_golden_ones(two_ranks, ranks):
    made, golden = two_ranks["golden"], GOLDEN
    assert len(golden[ranks]) == 50 and golden[ranks][-1] < golden[ranks][0] - 1
    if made["fingerprint"] == golden["fingerprint"]:
        assert made[ranks] == golden[ranks]
    assert made[ranks] == pytest.approx(golden[ranks], rel=1e-4)


def test_one_rank_and_two_learn_the_same():
    assert GOLDEN["two"] == pytest.approx(GOLDEN["one"], rel=1e-4)
