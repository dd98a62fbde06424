"""Federated averaging against a server written by hand: clients on any number of ranks, absent ones, and what stays."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import turning
from turning import ABSENT, SIZES, by_hand

from shoestring.checkpoint import Plain
from shoestring.comm import FedAvg
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.testing import Pool, jobs
from shoestring.testing.scenarios import encode

EVERY, ROUNDS = 3, 4
STYLE = FedAvg(every=EVERY, private=("style.*",))


def apart(one, other):
    """The largest difference of two dicts of nested lists with the same keys."""
    assert one.keys() == other.keys()
    return max(float((torch.tensor(one[key]) - torch.tensor(other[key])).abs().max()) for key in one)


def alone(*features, **arguments):
    return turning.run(feature=[encode(feature) for feature in features], alone=True, **arguments)


def both(pool, *features, **arguments):
    return pool.call(turning.run, feature=[encode(feature) for feature in features], **arguments)


@pytest.mark.parametrize("feature", [
    STYLE,
    pytest.param(
        FedAvg(every=EVERY, client_weights="equal", proximal=0.3, private=("style.*",)), marks=pytest.mark.slow
    ),
    pytest.param(FedAvg(every=EVERY, proximal=0.1), marks=pytest.mark.slow),
])  # fmt: skip
def test_clients_on_any_number_of_ranks_are_averaged_as_by_one_server(pool: Pool, feature: FedAvg) -> None:
    """Also where clients are absent: they are skipped, and return with their own position and parameters."""
    *wanted, stored = by_hand(
        ROUNDS, EVERY, feature.client_weights == "samples", feature.proximal, bool(feature.private)
    )
    one, (first, second) = alone(feature, rounds=ROUNDS), both(pool, feature, rounds=ROUNDS)
    for result in (one, first, second):
        assert len(result["rounds"]) == ROUNDS
        for got, right in zip(result["rounds"], wanted, strict=True):
            assert apart(got, right) < 1e-10
    assert first["rounds"] == second["rounds"]
    turns = [{(number, name) for number, name in result["turns"] if name} for result in (one, first, second)]
    assert turns[0] == turns[1] | turns[2] and not turns[1] & turns[2]
    assert turns[0] == {(number, name) for number in range(ROUNDS) for name in SIZES} - {(n, c) for c, n in ABSENT}
    assert [2, ""] in second["turns"] or [2, ""] in first["turns"]  # only one client was there
    assert one["numbers"] == [5, 4, 1, 5]
    assert "4 rounds, each of 3.8 turns of this rank" in one["cost"]
    if feature.private:
        private = first["private"] | second["private"]
        assert first["private"].keys() == {"ann", "cem", "eva"} and private.keys() == SIZES.keys()
        for name in SIZES:
            assert apart(private[name], stored[name]) < 1e-10
            assert apart(private[name], one["private"][name]) < 1e-10


@pytest.mark.slow
def test_nothing_of_what_stays_with_clients_is_sent(pool: Pool) -> None:
    """What stays trains by a loss of its own: whatever it learns, all that collectives get is the same."""
    same = [both(pool, STYLE, rounds=2, scale=scale) for scale in (1.0, 2.0)]
    assert same[0][0]["private"] != same[1][0]["private"]
    assert [one["sent"] for one in same[0]] == [one["sent"] for one in same[1]]
    merged = [both(pool, FedAvg(every=EVERY), rounds=2, scale=scale) for scale in (1.0, 2.0)]
    assert [one["sent"] for one in merged[0]] != [one["sent"] for one in merged[1]]  # so it would be seen


def test_within_a_round_evaluations_and_exports_have_the_merged_weights() -> None:
    result = alone(STYLE, steps=10**6, stop=5 * EVERY + EVERY + 1)  # in the second client's turn of the second round
    (merged,) = result["rounds"]
    begun = {name: value.tolist() for name, value in turning.first_weights().items()}
    assert result["after"]["shared.weight"] != merged["shared.weight"]
    assert result["exported"]["shared.weight"] == merged["shared.weight"]
    assert result["exported"]["style.weight"] == begun["style.weight"] == merged["style.weight"]
    for name in SIZES:
        acting = result["acting"][name]
        assert acting["shared.weight"] == merged["shared.weight"]
        assert acting["norm.running_mean"] == merged["norm.running_mean"]
        assert acting["style.weight"] == result["private"][name]["style.weight"]


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_of_a_turn(pool: Pool, tmp_path: Path) -> None:
    """Bit by bit on as many ranks; on others the round starts again, and what stays with clients is not lost."""
    steps, stop = 30, 5 * EVERY + EVERY + 1
    whole = alone(STYLE, steps=steps)
    alone(STYLE, Plain(every=1), steps=steps, folder=str(tmp_path / "one"), stop=stop)
    rest = alone(STYLE, Plain(every=1), steps=steps, folder=str(tmp_path / "one"), resume=True)
    assert rest["start"] == stop and rest["after"] == whole["after"] and rest["private"] == whole["private"]
    pair = both(pool, STYLE, steps=steps)
    both(pool, STYLE, Plain(every=1), steps=steps, folder=str(tmp_path / "two"), stop=stop)
    again = both(pool, STYLE, Plain(every=1), steps=steps, folder=str(tmp_path / "two"), resume=True)
    for got, right in zip(again, pair, strict=True):
        assert got["start"] == stop and got["after"] == right["after"] and got["private"] == right["private"]
    more = both(pool, STYLE, Plain(every=1), steps=stop + 9, folder=str(tmp_path / "one"), resume=True)
    assert more[0]["start"] == steps or more[0]["rounds"]
    assert more[0]["rounds"][-1] == more[1]["rounds"][-1]
    assert (more[0]["private"] | more[1]["private"]).keys() == SIZES.keys()


@pytest.mark.slow
def test_a_run_may_be_prolonged_from_the_middle_of_a_round(tmp_path: Path) -> None:
    """Its last step merges an unfinished turn; the client then continues from the merged weights with its own ones."""
    steps = 5 * EVERY + EVERY + 1
    ended = alone(STYLE, Plain(every=1), steps=steps, folder=str(tmp_path))
    longer = alone(STYLE, Plain(every=1), steps=steps + 2 * EVERY, folder=str(tmp_path), resume=True)
    assert longer["start"] == steps and longer["turns"][0] == [1, "cem"]
    assert apart(longer["private"]["bob"], ended["private"]["bob"]) == 0 < apart(longer["after"], ended["after"])


@pytest.mark.parametrize(("settings", "message"), [
    ({"private": ("stlye.*",)}, "no parameter or buffer is called `stlye.*`"),
    ({"private": ("*",)}, "leaves no trained parameter to merge"),
    ({"every": 0}, "`comm.fedavg.every` must be at least 1"),
    ({"proximal": -1.0}, "`comm.fedavg.proximal` must be zero or a positive number"),
    ({"outer_lr": 0.0}, "`comm.fedavg` needs an outer_lr above 0"),
    ({"codec": "bf61"}, "`comm.fedavg.codec`: there is no codec `bf61`"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(settings, message):
    with pytest.raises(ConfigError) as refusal:
        compose(Job(jobs.tiny()), [FedAvg(**settings)])
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
