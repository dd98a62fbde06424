"""A training whose model is taken from its run folder has been trained to its end."""

import pytest

from benchmarks.harness import OutOfBudget
from benchmarks.training import ended, recipe, train_to_end
from tests.small_runs import write_texts


def test_a_stopped_run_leaves_a_model_and_has_not_ended(tmp_path):
    document = recipe(3, seed=0)
    document["model"] = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 2, "context": 16}
    document["run"] |= {"folder": str(tmp_path / "run"), "resume": "auto", "batch": 2, "evaluate_samples": 2}
    document["run"]["data"] = write_texts(tmp_path / "texts")
    document["data"] = {"vocabulary": 260, "sequence": 16}
    document["checkpoint"] = {"tiered": {}}
    checks = iter(range(9))

    def once():
        if next(checks):
            raise OutOfBudget

    with pytest.raises(OutOfBudget):
        train_to_end(document, once)
    assert (tmp_path / "run" / "model").is_dir() and not ended(tmp_path / "run")
    train_to_end(document)
    assert ended(tmp_path / "run") and not ended(tmp_path / "other")
