"""`data.per_rank`: each rank has data of its own, in its own order, which it resumes in."""

import json

import pytest
import tomli_w
import torch

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.models.loading import load_model
from shoestring.run import parse
from shoestring.testing import Pool
from shoestring.testing.pool import RankError
from shoestring.training.loop import train
from tests.forms import clients

HERE = clients.__name__
RUN = {"model": f"{HERE}:model", "data": f"{HERE}:clients", "loss": f"{HERE}:loss", "batch": 4, "steps": 10}
TABLES = {"data": {"per_rank": True}, "checkpoint": {"plain": {"every": 2}}, "optim": {"sgd": {"lr": 0.1}}}


def run(folder, tables=TABLES, **settings):
    table = {name: value for name, value in (RUN | settings).items() if value is not None}
    return parse({"run": table | {"folder": str(folder)}} | tables, name="clients")


def on_ranks(folder, tables, stop_after=0, **settings):
    clients.SEEN.clear()
    asked = iter([False] * stop_after + [True])
    stop = (lambda: next(asked)) if stop_after else None
    metrics = train(run(folder, tables, **settings), World.current(), stop=stop).metrics
    return {"seen": clients.SEEN, "metrics": {name: metrics.get(name) for name in ("held_out_loss", "rows", "owners")}}


@pytest.mark.slow
def test_each_rank_takes_its_own_samples_once_an_epoch(tmp_path):
    """10 steps of 2 samples a rank: three epochs of 6 samples and two of the second rank's 10."""
    with Pool(2, timeout=100) as pool:
        first, second = pool.call(on_ranks, folder=str(tmp_path), tables=TABLES, evaluate=f"{HERE}:owners")
    for rank, result, samples in ((0, first, 6), (1, second, 10)):
        owners, ids = zip(*result["seen"], strict=True)
        assert set(owners) == {rank} and len(ids) == 20
        for epoch in range(20 // samples):
            assert sorted(ids[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert [second["seen"][place][1] for place in range(6)] != [first["seen"][place][1] for place in range(6)]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["rows"] == 12 and first["metrics"]["owners"] == int("0" * 3 + "1" * 9)
    model, _ = load_model(tmp_path / "model")
    batch = [clients.Client(10, 3)[index] for index in range(3)] + [clients.Client(11, 9)[index] for index in range(9)]
    with torch.no_grad():
        logits = model(torch.stack([sample["inputs"] for sample in batch]))
    wanted = torch.nn.functional.cross_entropy(logits, torch.stack([sample["targets"] for sample in batch]))
    assert first["metrics"]["held_out_loss"] == pytest.approx(float(wanted), rel=1e-5)


LOCAL_STEPS = pytest.param({"comm": {"localsgd": {"every": 2}}}, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("features", [{}, LOCAL_STEPS], ids=["ddp", "local steps"])
def test_a_run_resumes_bitwise_on_as_many_ranks_and_no_others(tmp_path, features):
    tables = TABLES | features
    with Pool(2, timeout=100) as pool:
        whole = pool.call(on_ranks, folder=str(tmp_path / "whole"), tables=tables)
        before = pool.call(on_ranks, folder=str(tmp_path / "parts"), tables=tables, stop_after=5)
        after = pool.call(on_ranks, folder=str(tmp_path / "parts"), tables=tables, resume=True)
        for one, first, rest in zip(whole, before, after, strict=True):
            assert one["seen"] == first["seen"] + rest["seen"] and rest["seen"]
        one, other = (load_model(tmp_path / name / "model")[0].state_dict() for name in ("whole", "parts"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    with (
        Pool(1, timeout=100) as pool,
        pytest.raises(RankError, match="2 ranks had data of their own, and now there are 1"),
    ):
        pool.call(on_ranks, folder=str(tmp_path / "parts"), tables=tables, resume=True, steps=14)


@pytest.mark.slow
def test_an_epoch_is_one_of_the_longest_data(tmp_path, capsys):
    path = tmp_path / "run.toml"
    document = {"run": RUN | {"epochs": 2.0, "folder": str(tmp_path / "run")}} | TABLES
    del document["run"]["steps"]
    path.write_text(tomli_w.dumps(document))
    with Pool(2, timeout=100) as pool:
        pool.call(on_ranks, folder=str(tmp_path / "run"), tables=TABLES, epochs=2.0, steps=None)
    steps = json.loads((tmp_path / "run/summary.json").read_text())["steps"]
    assert steps == 2 * 10 // 2
    assert main(["trust", str(path)]) == 0 and main(["check", str(path), "--workers", "2", "--folder", "new"]) == 0
    assert "parameters: 12" in capsys.readouterr().out


def refused(tables, **settings):
    with pytest.raises(ConfigError) as caught:
        train(run("unused", tables, **settings), World.current())
    return str(caught.value)


@pytest.mark.slow
def test_lengths_that_differ_are_refused_unless_they_are_declared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    undeclared = {"data": {}} | {name: table for name, table in TABLES.items() if name != "data"}
    with Pool(2, timeout=100) as pool:
        for message in pool.call(refused, tables=undeclared, data=f"{HERE}:undeclared"):
            assert "8 on rank 0, 9 on rank 1" in message and "data.per_rank" in message
        with pytest.raises(RankError, match="rank 1 has no held-out data, and other ranks have some"):
            pool.call(on_ranks, folder=str(tmp_path / "one"), tables=TABLES, data=f"{HERE}:only_first")
    for tables, said in (
        ({"data": {"per_rank": True, "cache_memory": 1.0}}, "a cache that the ranks of a host share"),
        ({"data": {"per_rank": True}, "run": {"data": "python-stdlib"}}, "only for data sets of your own"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(parse(tables), World())
