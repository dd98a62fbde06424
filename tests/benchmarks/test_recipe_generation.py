"""The benchmark of the recipe `generation`: its methods train at toy size, are stored, and are compared by seed."""

import pytest

from benchmarks.harness import Deadline
from benchmarks.recipes import generation
from benchmarks.recipes.__main__ import command


def test_the_part_can_be_named_alone(capsys):
    assert command(["--only", "generation", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "recipes.generation-class  >= -0.05" in printed and "recipes.generation-plain  > 1" in printed


def cell(kind, style, distance):
    judge = {"class": kind, "style": style, "style_taught": style, "style_untaught": style, "distance": distance}
    other = judge | {"class": kind + 0.01, "style": style + 0.01, "distance": 2 * distance}
    return {"diversity": 0.1, "convolutions": judge, "residual": other}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study in which nothing is trained, and the list of what was asked for."""
    asked = []

    def method(name, seed, steps):
        asked.append((name, steps))
        return cell(0.7, 0.95, {"spade": 1.0, "plain GAN": 2.0, "L1": 0.5, "spade, last weights": 1.5}[name])

    monkeypatch.setattr(generation, "judge", lambda name: None)
    monkeypatch.setattr(generation, "judged_method", method)
    monkeypatch.setattr(generation, "judged_real", lambda seed: cell(0.8, 0.97, 0.1))
    monkeypatch.setattr(generation, "steps_of_all", lambda: dict.fromkeys(generation.METHODS, 7))
    return generation.Study(tmp_path, Deadline()), asked


def test_trainings_are_stored_and_compared_by_seed(study, tmp_path):
    contest, asked = study
    lost = generation.kept_class(contest)
    assert lost.value == pytest.approx(-0.1) and "diversity 0.100" in lost.note and "real:" in lost.note
    assert generation.kept_style(contest).value == pytest.approx(0.95)
    assert generation.nearer(contest, "plain GAN").value == pytest.approx(2)
    assert generation.nearer(contest, "L1").value == pytest.approx(0.5)
    assert asked.count(("spade", 7)) == generation.SEEDS and len(asked) == 3 * generation.SEEDS
    again = generation.Study(tmp_path, Deadline())
    assert generation.nearer(again, "plain GAN").value == pytest.approx(2) and len(asked) == 3 * generation.SEEDS
    rows = generation.table(tmp_path).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| real", "| spade", "| plain GAN", "| L1"]
    assert "| 0.70 / 0.71 | 0.95 / 0.96 |" in rows[3]


def test_the_worse_judge_counts(study, monkeypatch):
    contest, _ = study
    monkeypatch.setattr(contest, "values", lambda method, figure, name: [0.9 if name == "residual" else 0.95] * 3)
    assert generation.kept_style(contest).value == pytest.approx(0.9)


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("method", generation.METHODS)
def test_every_method_trains_and_is_judged(method, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "CACHE", tmp_path)
    monkeypatch.setattr(generation, "TEST", 32)
    monkeypatch.setattr(generation, "JUDGE_STEPS", 2)
    for cached in (generation.judge, generation.test_samples):
        cached.cache_clear()
    monkeypatch.setitem(generation.METHODS, method, (*generation.METHODS[method], "--optim.schedule.warmup", "1"))
    judged = generation.judged_method(method, 5, 2)
    assert judged["steps"] == 2 and 0 <= judged["diversity"] <= 1
    assert all(0 <= judged[name]["style"] <= 1 and judged[name]["distance"] >= 0 for name in generation.JUDGES)
    for cached in (generation.judge, generation.test_samples):
        cached.cache_clear()
