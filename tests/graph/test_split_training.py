"""Training with operators that are split over ranks is training on one rank; what it does not serve is refused."""

from __future__ import annotations

import math
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.graph import Split, choosing
from shoestring.graph.names import HELD_FACT, SENT_FACT, WHOLE_FACT
from shoestring.graph.running import run_lockstep
from shoestring.models.loading import load_model
from shoestring.run import load
from shoestring.testing import jobs
from shoestring.testing.pool import Pool, RankError
from shoestring.verbs.check import check
from shoestring.verbs.plan import plan
from tests.graph import split_training
from tests.graph.split_training import write_cluster
from tests.small_runs import write_run_file, write_texts

STOP = 4


def same(results, wanted, began=0):
    """Whether all ranks have the losses, norms and weights of one rank from a step on, but for rounding."""
    for result in results:
        assert result["began"] == began
        for name in ("losses", "norms"):
            assert result[name] == pytest.approx(wanted[name][began:], rel=1e-10, abs=1e-10)
        for name in ("held_out", "weights"):
            assert result[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-9)


@pytest.fixture(scope="module")
def pool_of():
    """Function from a number of ranks to their pool."""
    with ExitStack() as stack:
        yield cache(lambda ranks: stack.enter_context(Pool(ranks, timeout=120)))


def test_the_program_of_a_job_computes_its_loss_and_the_gradients_of_tied_weights(tmp_path):
    """On all ranks in one process."""
    model, batch = split_training.small().double(), jobs.batch(0, ragged=True)
    split = Split(cluster=write_cluster(tmp_path / "cluster.toml", 2))
    job = ss.compose(Job(model, world=World(size=2, local_size=2), example=lambda: jobs.batch(0)), [split], dry=True)
    attachments = attachments_of(job)
    traced, plan = choosing.trace_job(attachments, split), choosing.chosen(attachments, split)
    program = plan.divided(traced, (2,)).program()
    assert len(program.messages) > 2
    (choices,) = plan.choices
    elsewhere = replace(plan, choices=[[*choices[:-1], 99]])  # as if more rules had been found where it was searched
    with pytest.raises(ConfigError, match="by a rule that this rank has not found"):
        elsewhere.divided(traced, (2,))
    nodes, start = traced.step.nodes, torch.tensor(0.5, dtype=torch.float64)
    names = {node: name.removeprefix(choosing.PREFIX) for name, node in nodes.parameters.items()}
    values = {node: model.get_parameter(name).detach() for node, name in names.items()}
    values |= dict(zip(nodes.inputs, batch.values(), strict=True)) | dict.fromkeys(nodes.tangents, start)
    holders = [node for node in traced.step.graph.nodes if node.op == "placeholder"]
    outputs = run_lockstep(program, [values[node] for node in holders])
    total, count = cross_entropy(model(batch["inputs"]), batch)
    (total * start).backward()
    computed = [one for one, (kind, _) in zip(outputs, nodes.outputs, strict=True) if kind == "result"]
    assert torch.allclose(computed[0], total, rtol=1e-12) and int(computed[1]) == int(count)
    gradients = {name: one for one, (kind, name) in zip(outputs, nodes.outputs, strict=True) if kind == "gradient"}
    trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert gradients.keys() == {choosing.PREFIX + name for name in trained}
    for name, gradient in trained.items():
        assert torch.allclose(gradients[choosing.PREFIX + name], gradient, rtol=1e-10, atol=1e-12), name


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = split_training.small(), torch.tensor(2.0)

    def forward(self, tokens):
        return self.inner(tokens) * self.scale


class Asking(Constant):
    def forward(self, tokens):
        return self.inner(tokens) if tokens.sum() > 0 else self.inner(-tokens)


def refused(model, features, ranks=2, **settings):
    """The message with which a job is refused, before ranks are started."""
    job = Job(model, world=World(size=ranks, local_size=ranks), example=lambda: jobs.batch(0), **settings)
    with pytest.raises(ConfigError) as caught:
        ss.compose(job, features, dry=True)
    return caught.value


def test_what_cannot_be_split_is_refused_before_ranks_start(tmp_path):
    split = Split(cluster=write_cluster(tmp_path / "two.toml", 2))
    four = Split(cluster=write_cluster(tmp_path / "four.toml", 4))
    assert "names no file" in str(refused(split_training.small(), [Split()]))
    assert "cannot read `missing.toml`" in str(refused(split_training.small(), [Split(cluster="missing.toml")]))
    assert "has measured 4 ranks, and there are 2" in str(refused(split_training.small(), [four]))
    assert "draws random numbers" in str(refused(jobs.tiny(0.1), [split]))
    assert "reads a constant" in str(refused(Constant(), [split]))
    assert "if tokens.sum() > 0" in str(refused(Asking(), [split]))
    assert "must be 0 or more" in str(refused(split_training.small(), [Split(gib=-1)]))
    tight = Split(cluster=split.cluster, gib=1e-6)
    assert "no plan fits" in str(refused(split_training.small(), [tight]))
    for other in (ss.parallel.DDP(), ss.precision.Autocast(), ss.graph.Compile(), ss.optim.EMA(), ss.comm.BF16()):
        error = refused(split_training.small(), [split, other])
        assert isinstance(error, ConflictError) and f"`{other.name}` does not work with `graph.split`" in str(error)
    for ranks, mesh in ((2, (2, 2)), (1, (2,)), (2, (2, 1))):
        error = refused(split_training.small(), [Split(cluster=split.cluster, mesh=mesh)], ranks)
        assert f"`graph.split.mesh` has {' × '.join(map(str, mesh))} ranks, and a host has {ranks}" in str(error)
    job = Job(split_training.small(), world=World(size=4, local_size=2))
    with pytest.raises(ConfigError, match="there are 2 hosts"):
        ss.compose(job, [split], dry=True)


def test_a_check_says_what_the_plan_is_and_leaves_the_model_as_it_was(tmp_path):
    with torch.device("meta"):
        model = split_training.small().eval()
    split = Split(cluster=write_cluster(tmp_path / "cluster.toml", 2))
    world = World(size=2, local_size=2)
    job = ss.compose(Job(model, world=world, example=lambda: jobs.batch(0)), [split], dry=True)
    (feature,) = attachments_of(job).features
    assert "operators over 2 ranks" in feature.explain(attachments_of(job))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert model.head.weight is model.embedding.weight
    unknown = ss.compose(Job(model, world=world), [split], dry=True)
    assert "searched when the run starts" in split.explain(attachments_of(unknown))


@pytest.mark.slow
@pytest.mark.all_cases
@pytest.mark.parametrize(("mesh", "model", "order"), [
    ((4,), "gpt", "traced"),
    ((2,), "pictures", "searched"),
    ((2, 2), "pictures", "searched"),
    ((2, 2), "small", "traced"),
])  # fmt: skip
def test_ranks_compute_what_one_does(pool_of, tmp_path, mesh, model, order):
    cluster = write_cluster(tmp_path / "cluster.toml", math.prod(mesh))
    results = pool_of(math.prod(mesh)).call(split_training.train, model=model, cluster=cluster, order=order, mesh=mesh)
    same(results, split_training.train(model=model))
    assert results[0]["facts"][SENT_FACT] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "gib", "held"), [
    pytest.param((), 1.6e-4, 0.8, marks=pytest.mark.all_cases),
    ((2, 2), 1.0e-4, 0.6),
])  # fmt: skip
def test_a_stopped_run_goes_on_bit_by_bit_and_on_one_rank(pool_of, tmp_path, mesh, gib, held):
    """With several micro-batches, and so little memory that most weights are in shards."""
    ranks = math.prod(mesh) if mesh else 2
    cluster, several = write_cluster(tmp_path / "cluster.toml", ranks), pool_of(ranks)
    arguments = {"model": "gpt", "cluster": cluster, "gib": gib, "micro": 2, "order": "searched", "mesh": mesh}
    wanted = split_training.train(model="gpt", micro=2)
    whole = several.call(split_training.train, **arguments)
    same(whole, wanted)
    assert "parameters in shards" in whole[0]["plan"]
    assert whole[0]["facts"][HELD_FACT] < held * whole[0]["facts"][WHOLE_FACT]
    folder, copied = tmp_path / "several", tmp_path / "one"
    several.call(split_training.train, **arguments, folder=str(folder), stop=STOP)
    shutil.copytree(folder / "checkpoints", copied / "checkpoints")
    rest = several.call(split_training.train, **arguments, folder=str(folder), resume=True)
    for before, after in zip(whole, rest, strict=True):
        assert after["began"] == STOP
        assert (after["losses"], after["weights"]) == (before["losses"][STOP:], before["weights"])
    same([split_training.train(model="gpt", micro=2, folder=str(copied), resume=True)], wanted, began=STOP)


@pytest.mark.slow
def test_a_batch_of_another_size_is_refused(pool_of, tmp_path):
    cluster = write_cluster(tmp_path / "cluster.toml", 2)
    with pytest.raises(RankError, match="a micro-batch has the sizes"):
        pool_of(2).call(split_training.train, model="small", cluster=cluster, sizes=(8, 4))


@pytest.mark.slow
def test_a_run_file_trains_by_its_plan_and_its_report_says_how(pool_of, tmp_path):
    cluster = write_cluster(tmp_path / "cluster.toml", 2)
    settings = {"data": write_texts(tmp_path / "texts"), "steps": 4, "evaluate_every": 2, "resume": "auto"}
    write_run_file(tmp_path / "one.toml", {"run": settings})
    path = write_run_file(tmp_path / "two.toml", {"run": settings, "graph": {"split": {"cluster": cluster}}})
    lines = "\n".join(check(load(str(path)), workers=2))
    assert "operators over 2 ranks" in lines and "memory: as graph.split says above" in lines
    with pytest.raises(ConfigError, match="has measured 2 ranks, and there are 3"):
        list(check(load(str(path)), workers=3))
    with pytest.raises(ConfigError, match="by a search of its own"):
        plan(load(str(path)), World())
    arguments = {"path": str(path), "folder": str(tmp_path / "two")}
    (rows, _) = pool_of(2).call(split_training.train_run, **arguments)
    wanted = split_training.train_run(path=str(tmp_path / "one.toml"), folder=str(tmp_path / "one"))
    for key in ("loss", "held_out_loss"):
        ours, theirs = ([row[key] for row in of_run if key in row] for of_run in (rows, wanted))
        assert ours and ours == pytest.approx(theirs, rel=1e-4)
    assert load_model(tmp_path / "two") is not None
    page = (tmp_path / "two" / "report.html").read_text()
    assert "Split operators" in page and "bytes of weights that a rank holds" in page
