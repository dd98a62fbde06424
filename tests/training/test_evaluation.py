"""Evaluations during a run: the user's own metrics, early stopping, and the best model so far."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.models.loading import load_model
from shoestring.run import parse
from shoestring.testing import Pool, jobs
from shoestring.training.loop import train

HERE = __name__


class Samples(Dataset):
    """Learnable text (`jobs.batch`) to train on; held out, text in which the opposite would have to be learned."""

    fingerprint = "samples"

    def __init__(self, first):
        batches = [jobs.batch(first + number) for number in range(8)]
        self.rows = [{k: batch[k][row] for k in batch} for batch in batches for row in range(jobs.BATCH)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class ShuffledSamples(Samples):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row | {"targets": (row["targets"] + 7) % jobs.VOCABULARY}


def learnable():
    return Samples(0), Samples(jobs.HELD_OUT)


def misleading():
    return Samples(0), ShuffledSamples(0)


def alone():
    return Samples(0)


def share_of_hits(model):
    assert not model.training and not torch.is_grad_enabled()
    batch = jobs.batch(jobs.HELD_OUT)
    return {"hits": (model(batch["inputs"]).argmax(-1) == batch["targets"]).double().mean()}


def not_a_dict(model):
    return 0.5


def run(folder, features=None, **settings):
    own = {"model": "shoestring.testing.jobs:tiny", "data": f"{HERE}:learnable", "steps": 12, "batch": 8} | settings
    own |= {"folder": str(folder)}
    document = {"run": own, "optim": {"sgd": {"lr": 0.3}}, "checkpoint": {"plain": {"every": 1, "keep": 20}}}
    return parse(document | (features or {}), name="task")


def rows(folder, key):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in found if key in row}


def test_metrics_of_the_users_own_are_written_at_each_evaluation(tmp_path):
    result = train(run(tmp_path, evaluate=f"{HERE}:share_of_hits", evaluate_every=4), World())
    assert list(rows(tmp_path, "hits")) == [4, 8, 12] == list(rows(tmp_path, "held_out_loss"))
    assert 0 < result.metrics["hits"] <= 1 and rows(tmp_path, "hits")[12] == result.metrics["hits"]


def test_training_ends_early_where_the_held_out_loss_rises(tmp_path):
    settings = {"data": f"{HERE}:misleading", "evaluate_every": 1, "patience": 3, "steps": 60, "save_best": True}
    result = train(run(tmp_path, **settings), World())
    losses = rows(tmp_path, "held_out_loss")
    best = min(losses, key=lambda step: losses[step])
    assert result.status == "finished" and max(losses) == best + 3 < 60
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "ended early: 3 evaluations without a lower held-out loss" in summary["notes"]
    assert f"after step {best}, in the folder `best`" in summary["notes"][1]
    again = train(run(tmp_path, resume=True, **settings), World())  # nothing is left to do
    assert again.status == "finished" and max(rows(tmp_path, "held_out_loss")) == best + 3
    assert json.loads((tmp_path / "summary.json").read_text())["notes"] == summary["notes"]  # none was counted twice


@pytest.mark.parametrize("steps", [8, 60])
def test_the_last_step_is_evaluated_in_one_row(tmp_path, steps):
    """At the end of the run, and where patience ends it."""
    settings = {"data": f"{HERE}:misleading", "evaluate_every": 1, "patience": 3, "steps": steps, "save_best": True}
    train(run(tmp_path, **settings), World())
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in written if "held_out_loss" in row]
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == written[-1]["step"]


def test_the_best_model_is_the_one_of_its_step(tmp_path):
    """Its held-out loss is what was written then; a run that is stopped and resumed keeps the same one."""
    settings = {"data": f"{HERE}:misleading", "evaluate_every": 1, "save_best": True, "steps": 8}
    train(run(tmp_path / "whole", **settings), World())
    losses = rows(tmp_path / "whole", "held_out_loss")
    losses.pop(8)  # the last row of a step counts, and that is of all held-out data
    expected = min(losses.values())
    model, _ = load_model(tmp_path / "whole/best")
    with torch.no_grad():
        samples = [misleading()[1][index] for index in range(64)]
        logits = model(torch.stack([sample["inputs"] for sample in samples]))
        targets = torch.stack([sample["targets"] for sample in samples])
        found = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert float(found) == pytest.approx(expected, rel=1e-5)
    asked = iter([False] * 4 + [True])
    train(run(tmp_path / "parts", **settings), World(), stop=lambda: next(asked))
    train(run(tmp_path / "parts", resume=True, **settings), World())
    other, _ = load_model(tmp_path / "parts/best")
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert rows(tmp_path / "parts", "held_out_loss") == rows(tmp_path / "whole", "held_out_loss")


def test_a_run_shorter_than_its_evaluations_are_apart_has_a_best_model(tmp_path):
    train(run(tmp_path, data=f"{HERE}:misleading", evaluate_every=25, save_best=True, steps=6), World())
    load_model(tmp_path / "best")
    assert list(rows(tmp_path, "held_out_loss")) == [6]


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for(tmp_path):
    """The checkpoint of a step is written before its evaluation: what is resumed has not seen it."""
    settings = {"data": f"{HERE}:misleading", "evaluate_every": 2, "save_best": True, "steps": 8}
    asked = iter([False] * 3 + [True])
    train(run(tmp_path, **settings), World(), stop=lambda: next(asked))
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    without = [row for row in kept if not (row["step"] == 4 and "held_out_loss" in row)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    train(run(tmp_path, resume=True, **settings), World())
    assert list(rows(tmp_path, "held_out_loss")) == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patience": 2}, "`run.patience` needs evaluations during the run"),
        ({"save_best": True}, "`run.save_best` needs evaluations during the run"),
        ({"patience": -1}, "`run.patience` must be zero or a positive number"),
        ({"patience": 1, "evaluate_every": 2, "data": f"{HERE}:alone"}, "`run.patience` needs the held-out loss"),
        ({"evaluate": f"{HERE}:share_of_hit"}, "`run.evaluate`: .* has no callable `share_of_hit` .*`share_of_hits`"),
        ({"evaluate": f"{HERE}:not_a_dict"}, "`run.evaluate`: .* returned 0.5, not a dict of numbers"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        train(run(tmp_path, **({"steps": 1} | settings)), World())


def test_check_finds_an_evaluation_that_is_not_there(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f'[run]\nevaluate = "{HERE}:share"\n')
    assert main(["trust", str(tmp_path / "run.toml")]) == 0
    assert main(["check", str(tmp_path / "run.toml")]) == 2
    assert "has no callable `share`" in " ".join(capsys.readouterr().err.split())


def on_two_ranks(folder, features):
    settings = {"data": f"{HERE}:misleading", "evaluate_every": 1, "patience": 3, "steps": 60, "save_best": True}
    result = train(run(folder, features, evaluate=f"{HERE}:share_of_hits", **settings), World.current())
    return {"status": result.status, "held_out": result.metrics["held_out_loss"], "hits": result.metrics["hits"]}


@pytest.mark.slow
@pytest.mark.parametrize("features", [{}, {"parallel": {"fsdp": {}}}], ids=["ddp", "fsdp"])
def test_ranks_stop_together_and_keep_one_best_model(tmp_path, features):
    with Pool(2, timeout=100) as pool:
        first, second = pool.call(on_two_ranks, folder=str(tmp_path), features=features)
    assert first == second and first["status"] == "finished"
    losses = rows(tmp_path, "held_out_loss")
    assert max(losses) == min(losses, key=lambda step: losses[step]) + 3
    assert load_model(tmp_path / "best")[0].state_dict().keys() == jobs.tiny().state_dict().keys()
