"""`run.forward` and `run.collate`: batches of any form, wherever the model is called on samples."""

import json
import tomllib

import pytest
import tomli_w
import torch

from shoestring.cli import main
from shoestring.core.errors import ConfigError, DataError
from shoestring.core.world import World
from shoestring.models.loading import load_model
from shoestring.run import parse
from shoestring.testing import Pool
from shoestring.training.loop import train
from shoestring.verbs.plan import plan
from tests.forms import two_towers
from tests.forms.two_towers import RUN

TABLES = {"optim": {"sgd": {"lr": 0.1, "momentum": 0.0, "nesterov": False}}, "checkpoint": {"plain": {"every": 2}}}


def run(folder, tables=TABLES, **settings):
    return parse({"run": RUN | settings | {"folder": str(folder)}} | tables, name="forms")


def plain(steps, loss="distance"):
    """The losses of a loop by hand, on the same batches."""
    from shoestring.data.loader import Loader

    torch.manual_seed(0)
    model, losses = two_towers.towers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,), _ in zip(
        Loader(two_towers.pairs()[0], batch=8, collate=two_towers.padded), range(steps), strict=False
    ):
        total, count = getattr(two_towers, loss)(two_towers.forward(model, batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    held_out = two_towers.padded(list(two_towers.pairs()[1]))
    with torch.no_grad():
        total, count = getattr(two_towers, loss)(two_towers.forward(model, held_out), held_out)
    return losses, float(total) / count


def in_batches(folder, size):
    """The held-out loss of `matched`, in batches of `size` pairs."""
    model, held_out, total = load_model(folder / "model")[0], list(two_towers.pairs()[1]), 0.0
    with torch.no_grad():
        for start in range(0, len(held_out), size):
            batch = two_towers.padded(held_out[start : start + size])
            total += float(two_towers.matched(two_towers.forward(model, batch), batch)[0])
    return total / len(held_out)


def rows(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in lines if key in row]


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["one batch", "accumulate"])
@pytest.mark.parametrize("loss", ["distance", "matched"])
def test_a_run_is_the_loop_by_hand_and_counts_each_held_out_sample_once(tmp_path, settings, loss):
    """11 held-out samples do not divide by 8, and the samples have no targets that could be ignored."""
    own = f"{two_towers.__name__}:{loss}"
    result = train(run(tmp_path, loss=own, evaluate_samples=0, **settings), World())
    losses, held_out = plain(4, loss)
    assert rows(tmp_path, "loss") == pytest.approx(losses, rel=1e-5)
    if loss == "matched":  # whose negatives are those of the batches of an evaluation
        held_out = in_batches(tmp_path, 8)
    assert result.metrics["held_out_loss"] == pytest.approx(held_out, rel=1e-5)


def on_ranks(folder, tables, **settings):
    return train(run(folder, tables, **settings), World.current()).metrics["held_out_loss"]


@pytest.mark.parametrize(
    "features",
    [
        {"parallel": {"fsdp": {}}},
        pytest.param({"memory": {"zero": {}}}, marks=pytest.mark.slow),
        pytest.param({"comm": {"dense": {}}}, marks=pytest.mark.slow),
        pytest.param({"memory": {"zero": {"stage": 2}}}, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "zero", "dense", "zero 2"],
)
def test_negatives_are_those_of_all_ranks_and_micro_batches(tmp_path, features):
    settings = {"loss": f"{two_towers.__name__}:matched", "accumulate": 2, "evaluate_samples": 0}
    with Pool(2, timeout=200) as pool:
        found = pool.call(on_ranks, folder=str(tmp_path), tables=TABLES | features, **settings)
    losses, _ = plain(4, "matched")
    assert rows(tmp_path, "loss") == pytest.approx(losses, rel=1e-5)
    assert found == pytest.approx([in_batches(tmp_path, 8)] * 2, rel=1e-5)


@pytest.mark.parametrize("shard", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_ranks_compute_what_one_does(tmp_path, shard):
    """4 ranks of 2 samples: in the second round one of 3 samples is left for 4 ranks, so one counts nothing."""
    with Pool(4, timeout=200) as pool:
        found = pool.call(on_ranks, folder=str(tmp_path), tables=TABLES | {"parallel": {shard: {}}})
    losses, held_out = plain(4)
    assert rows(tmp_path, "loss") == pytest.approx(losses, rel=1e-5) and found == pytest.approx(
        [held_out] * 4, rel=1e-5
    )


def test_a_run_resumes_bitwise(tmp_path):
    asked = iter([False, False, True])
    train(run(tmp_path / "parts", TABLES, steps=6), World(), stop=lambda: next(asked))
    train(run(tmp_path / "parts", TABLES, steps=6, resume=True), World())
    train(run(tmp_path / "whole", TABLES, steps=6), World())
    one, other = (load_model(tmp_path / name / "model")[0].state_dict() for name in ("parts", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_run_of_a_version_with_fewer_keys_resumes(tmp_path):
    train(run(tmp_path, steps=2), World())
    file = tmp_path / "run.toml"
    document = tomllib.loads(file.read_text())
    for key in ("arguments", "per_rank"):
        del document["data"][key]
    file.write_text(tomli_w.dumps(document))
    train(run(tmp_path, steps=4, resume=True), World())
    assert len(rows(tmp_path, "loss")) == 4
    with pytest.raises(ConfigError, match=r"its `data\.per_rank` is False, this one's is True"):
        train(run(tmp_path, TABLES | {"data": {"per_rank": True}}, steps=6, resume=True), World())


def test_samples_of_two_lengths_without_a_function_are_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"samples cannot be stacked to a batch: one is \{text: ") as caught:
        train(run(tmp_path, collate=""), World())
    assert "run.collate" in caught.value.hint


@pytest.mark.slow
def test_check_predicts_the_memory_of_such_batches(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({"run": RUN | {"folder": str(tmp_path / "run")}} | TABLES))
    assert main(["trust", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    assert "predicted from its operators" in capsys.readouterr().out
    path.write_text(path.read_text() + "\n[memory.budget]\ngib = 1.0\n")
    main(["trust", str(path)])
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--memory.budget.gib", "0.00001"]) == 2
    assert "cannot be met" in capsys.readouterr().err
    assert main(["check", str(path), "--forward", f"{two_towers.__name__}:no_such"]) == 2
    assert "has no callable `no_such`" in " ".join(capsys.readouterr().err.split())


def test_somebody_elses_functions_are_not_imported(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({"run": {"forward": "no.such:one", "collate": "no.such:other"}}))
    assert main(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "run.forward: no.such:one" in shown and "run.collate: no.such:other" in shown


@pytest.mark.slow
def test_a_finished_run_is_pruned_by_the_inputs_of_its_own_samples(tmp_path):
    train(run(tmp_path / "run"), World())
    arguments = ["--method", "wanda", "--samples", "16", "--layers", "layers.*"]
    assert main(["prune", str(tmp_path / "run"), "--out", str(tmp_path / "pruned"), *arguments]) == 0
    pruned, _ = load_model(tmp_path / "pruned")
    weight = pruned.layers[0].weight
    assert (weight.view(32, 8, 4) != 0).sum(-1).eq(2).all()
    dense, _ = load_model(tmp_path / "run")
    batch = two_towers.padded(list(two_towers.pairs()[0])[:64:4])
    norms = dense.bags[0](batch["text"]).square().sum(0).sqrt()
    kept = (dense.layers[0].weight.abs() * norms).view(32, 8, 4).topk(2).indices.sort(-1).values
    assert torch.equal(kept, weight.view(32, 8, 4).ne(0).float().topk(2).indices.sort(-1).values)


def planned(folder, tables, **settings):
    return plan(run(folder, tables, **settings), World.current(), tries=0).exchanged.chooser.decision.choice


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["distance", "matched"])
def test_a_plan_and_a_choice_in_training_measure_such_batches(tmp_path, loss):
    """The choice is made in the first pass with gradients, which is the second one of a loss over the whole batch."""
    own = {"loss": f"{two_towers.__name__}:{loss}", "accumulate": 2}
    auto = {"comm": {"auto": {"allow": ["bf16"], "trials": 1}}}
    with Pool(2, timeout=200) as pool:
        first, second = pool.call(planned, folder=str(tmp_path / "plan"), tables=auto, **own)
        assert first == second and first
        found = pool.call(on_ranks, folder=str(tmp_path / "run"), tables=TABLES | auto, **own)
    assert found[0] == found[1] and len(rows(tmp_path / "run", "loss")) == 4


def some(samples: int = 64, seed: int = 0, *, held_out: bool = True):
    train = two_towers.Pairs(samples, seed)
    return (train, two_towers.Pairs(11, 1)) if held_out else train


@pytest.mark.slow
def test_the_function_of_the_data_gets_its_arguments(tmp_path, capsys):
    tables = TABLES | {"data": {"arguments": {"samples": 24, "held_out": False}}}
    result = train(run(tmp_path / "run", tables, data=f"{__name__}:some"), World())
    assert "held_out_loss" not in result.metrics
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({"run": RUN | {"data": f"{__name__}:some"}} | tables))
    assert main(["trust", str(path)]) == 0
    for arguments in ([], ["--data.arguments.samples", "30"]):
        assert main(["check", str(path), *arguments]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "--data.arguments.size", "3"]) == 2
    assert "cannot be called with {'samples': 24, 'held_out': False, 'size': 3}" in capsys.readouterr().err
    changed = tomli_w.dumps({"run": RUN | {"data": f"{__name__}:some"}} | TABLES | {"data": {"arguments": {"seed": 1}}})
    path.write_text(changed)
    assert main(["check", str(path)]) == 0 and "nobody has vouched" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"\[data.arguments\] is for a function of your own"):
        train(parse({"data": {"arguments": {"seed": 1}}}), World())
