"""The benchmark of the recipe `retrieval`: cells are stored and compared, and killed builders leave whole indexes."""

import numpy as np
import pytest

from benchmarks.harness import Deadline
from benchmarks.recipes import cells, retrieval
from benchmarks.recipes.__main__ import command
from tests.benchmarks.inline_pool import Inline


def test_a_part_can_be_named_alone(capsys):
    assert command(["--only", "retrieval", "--list"]) == 0
    assert "recipes.retrieval-better-10  >= 1.1" in capsys.readouterr().out


def test_cells_are_stored_and_compared_with_the_best_bm25(tmp_path, monkeypatch):
    made = []

    def judged(seed, method=""):
        made.append((seed, method))
        draws = np.random.default_rng([seed, len(method)])
        ranks = {"BM25": draws.permutation(20) + 1, "BM25, tuned": np.ones(20, int), "fused": np.ones(20, int)}
        ranks["BM25, tuned"][:10] = 7
        if method:
            ranks["fused"][:5] = 2
        ranks["fused"][10:11] = 99
        return {
            "seed": seed,
            "method": method,
            "share": 0.5,
            "ranks": {name: row.tolist() for name, row in ranks.items()},
        }

    monkeypatch.setattr(retrieval, "judged", judged)
    monkeypatch.setattr(cells, "ProcessPoolExecutor", Inline)
    study = retrieval.Study(tmp_path, Deadline())
    above = retrieval.above_best(study, 1)
    assert above.value == pytest.approx(0.45) and above.interval[0] < 0.45 < above.interval[1]
    assert above.interval[0] > 0 and "fused 0.950" in above.note
    assert retrieval.above_best(study, 10).value == pytest.approx(-0.05)
    assert retrieval.over_best(study, 1).value == pytest.approx(1.9)
    assert retrieval.gained(study, "", "last weights").value == pytest.approx(0.25)
    assert len(made) == 2 * retrieval.SEEDS and len(set(made)) == len(made)
    retrieval.above_best(retrieval.Study(tmp_path, Deadline()), 1)
    assert len(made) == 2 * retrieval.SEEDS
    assert "| last weights | fused | 3 | 0.700 | 0.950 |" in retrieval.table(tmp_path)


def test_the_interval_covers_seeds_and_queries():
    alike = np.tile([0.0, 1.0], (3, 50))
    over_queries = retrieval.over_both(alike, "").interval
    assert 0.38 < over_queries[0] < 0.45 < 0.55 < over_queries[1] < 0.62
    apart = np.array([[0.0] * 100, [0.0] * 100, [1.0] * 100])
    assert retrieval.over_both(apart, "").interval[0] < 0


@pytest.mark.slow
def test_a_killed_builder_leaves_the_old_index_or_the_new_one():
    measured = retrieval.interrupted(4, Deadline())
    assert measured.value == 0 and "4 kills" in measured.note
