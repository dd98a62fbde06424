"""The benchmark of the recipe `federated`: all methods at toy size, settings chosen without the left-out domain."""

import numpy as np
import pytest

from benchmarks.harness import Deadline
from benchmarks.recipes import cells, federated
from benchmarks.recipes.__main__ import command
from shoestring_recipes.federated.digits import DOMAINS
from tests.benchmarks.inline_pool import Inline


@pytest.fixture
def toy(monkeypatch):
    """Made-up accuracies: the recipe is ahead of the baseline by .02, and on fonts by .05."""

    def tuning(method, number, learnt):
        best = {judged: 2 if "uci" in (learnt, judged) else 1 for judged in DOMAINS if judged != learnt}
        return {f"accuracy_{judged}": 0.5 + 0.1 * (number == other) for judged, other in best.items()}

    def cell(method, number, left_out, seed):
        ahead = {"separated": 0.05 if left_out == "fonts" else 0.02}.get(method, 0.0)
        probes = {"domain_from_features": 0.4, "class_from_style": 0.15}
        return {f"accuracy_{left_out}": 0.7 + ahead + seed % 7 / 1000, "number": number} | probes

    monkeypatch.setattr(federated, "tuning", tuning)
    monkeypatch.setattr(federated, "cell", cell)
    monkeypatch.setattr(cells, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(Inline, "made", [])


def test_a_part_can_be_named_alone(capsys):
    assert command(["--only", "federated", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "recipes.federated-works  >= -0.01" in printed and "recipes.federated-better  >= 0.03" in printed


@pytest.mark.slow
def test_cells_are_stored_and_settings_never_see_the_domain_left_out(tmp_path, toy):
    contest = federated.Contest(tmp_path, Deadline())
    above = contest.above(federated.BASELINE, lambda differences: differences.mean(0))
    assert above.value == pytest.approx(0.03) and above.interval == pytest.approx((0.03, 0.03))
    assert contest.lowest().value == pytest.approx(0.02) and "separated: scans 0.7" in above.note
    assert contest.read("domain_from_features", 1 / 3).value == pytest.approx(0.4 - 1 / 3)
    trials = [made for made in Inline.made if made[0] == "tuning"]
    assert len(trials) == 5 * 4 * 3
    judged = [made for made in Inline.made if made[0] == "cell"]
    assert len(judged) == 5 * 3 * federated.SEEDS
    assert all(number == (1 if left_out == "uci" else 2) for _, _, number, left_out, _ in judged)
    again = federated.Contest(tmp_path, Deadline())
    assert np.array_equal(again.accuracy("pooled"), contest.accuracy("pooled")) and len(Inline.made) == 60 + 150
    assert "| separated | 10 |" in federated.table(tmp_path)


def test_who_chooses_settings_learns_from_one_domain_only():
    for learnt in DOMAINS:
        clients, held = federated.tuning_data(learnt, pooled=False)
        assert {name.rpartition("-")[0] for name in clients} == {learnt}
        judged = [number for number, name in enumerate(DOMAINS) if name != learnt]
        assert held.domains.unique().tolist() == judged
        assert held.domains[:200].unique().tolist() == judged  # an evaluation of some samples judges both
        together, _ = federated.tuning_data(learnt, pooled=True)
        assert len(together) == sum(map(len, clients.values()))


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("method", federated.METHODS)
def test_each_method_trains(method, monkeypatch):
    document = federated.settings()
    document["run"] |= {"steps": 4, "batch": 8}
    document["comm"]["fedavg"]["every"] = 1
    document["model"] = {"width": 8}
    monkeypatch.setattr(federated, "settings", lambda: federated.tomllib.loads(federated.tomli_w.dumps(document)))
    result = federated.cell(method, 1, "uci", 3)
    assert 0 <= result["accuracy_uci"] <= 1 and ("class_from_style" in result) == (method == federated.OURS)
    assert federated.tuning(method, 0, "uci").keys() == {"accuracy_scans", "accuracy_fonts"}
