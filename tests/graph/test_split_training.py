"""Training with operators that are split over ranks is training on one rank; what it does not serve is refused."""

from __future__ import annotations

from contextlib import ExitStack
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
from shoestring.graph.program import rank_program
from shoestring.graph.rules import RuleBook
from shoestring.graph.running import run_lockstep
from shoestring.testing import jobs
from shoestring.testing.pool import Pool, RankError
from tests.graph import split_training
from tests.graph.split_training import write_cluster


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
    model, batch = jobs.tiny().double(), jobs.batch(0, ragged=True)
    split = Split(cluster=write_cluster(tmp_path / "cluster.toml", 2))
    job = ss.compose(Job(model, world=World(size=2, local_size=2), example=lambda: jobs.batch(0)), [split], dry=True)
    attachments = attachments_of(job)
    traced, plan = choosing.trace_job(attachments, split), choosing.chosen(attachments, split)
    program = rank_program(traced.step, plan.rules(traced, RuleBook(2)), 2)
    assert len(program.messages) > 2
    nodes, start = traced.step.nodes, torch.tensor(0.5, dtype=torch.float64)
    names = {node: name.removeprefix(choosing.PREFIX) for name, node in nodes.parameters.items()}
    values = {node: model.get_parameter(name).detach() for node, name in names.items()}
    values |= dict(zip(nodes.inputs, batch.values(), strict=True)) | dict.fromkeys(nodes.tangents, start)
    holders = [node for node in traced.step.module.graph.nodes if node.op == "placeholder"]
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


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(pool_of, tmp_path):
    cluster = write_cluster(tmp_path / "cluster.toml", 2)
    results = pool_of(2).call(split_training.train, model="layers", cluster=cluster, micro=2)
    same(results, split_training.train(model="layers", micro=2))
    facts = results[0]["facts"]
    assert "parameters in shards" in results[0]["plan"]
    assert facts[SENT_FACT] > 0 and facts[HELD_FACT] <= facts[WHOLE_FACT]


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = jobs.tiny(), torch.tensor(2.0)

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
    assert "names no file" in str(refused(jobs.tiny(), [Split()]))
    assert "is no cluster file" in str(refused(jobs.tiny(), [Split(cluster="missing.toml")]))
    assert "has measured 4 ranks, and there are 2" in str(refused(jobs.tiny(), [four]))
    assert "draws random numbers" in str(refused(jobs.tiny(0.1), [split]))
    assert "reads a constant" in str(refused(Constant(), [split]))
    assert "if tokens.sum() > 0" in str(refused(Asking(), [split]))
    assert "must be 0 or more" in str(refused(jobs.tiny(), [Split(gib=-1)]))
    small = Split(cluster=split.cluster, gib=1e-6)
    assert "no plan fits" in str(refused(jobs.tiny(), [small]))
    for other in (ss.parallel.DDP(), ss.precision.Autocast(), ss.graph.Compile(), ss.optim.EMA(), ss.comm.BF16()):
        error = refused(jobs.tiny(), [split, other])
        assert isinstance(error, ConflictError) and f"`{other.name}` does not work with `graph.split`" in str(error)
    job = Job(jobs.tiny(), world=World(size=4, local_size=2))
    with pytest.raises(ConfigError, match="there are 2 hosts"):
        ss.compose(job, [split], dry=True)


def test_a_check_says_what_the_plan_is_and_leaves_the_model_as_it_was(tmp_path):
    with torch.device("meta"):
        model = jobs.tiny().eval()
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
@pytest.mark.parametrize(
    ("ranks", "model", "order"),
    [(2, "gpt", "searched"), (4, "gpt", "traced"), (2, "pictures", "searched"), (4, "layers", "searched")],
)
def test_ranks_compute_what_one_does(pool_of, tmp_path, ranks, model, order):
    cluster = write_cluster(tmp_path / "cluster.toml", ranks)
    wanted = split_training.train(model=model)
    same(pool_of(ranks).call(split_training.train, model=model, cluster=cluster, order=order), wanted)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_by_bit_and_on_other_ranks(pool_of, tmp_path):
    """With so little memory that most weights are in shards, of which checkpoints hold whole tensors."""
    arguments = {"model": "gpt", "cluster": write_cluster(tmp_path / "cluster.toml", 2), "gib": 3e-4}
    two = pool_of(2)
    whole = two.call(split_training.train, **arguments)
    assert whole[0]["facts"][HELD_FACT] < 0.8 * whole[0]["facts"][WHOLE_FACT]
    folders = [str(tmp_path / name) for name in ("bits", "one", "four")]
    for folder in folders:
        two.call(split_training.train, **arguments, folder=folder, stop=4)
    rest = two.call(split_training.train, **arguments, folder=folders[0], resume=True)
    for before, after in zip(whole, rest, strict=True):
        assert after["began"] == 4
        assert (after["losses"], after["weights"]) == (before["losses"][4:], before["weights"])
    wanted = split_training.train(model="gpt")
    same([split_training.train(model="gpt", folder=folders[1], resume=True)], wanted, began=4)
    arguments["cluster"] = write_cluster(tmp_path / "four.toml", 4)
    same(pool_of(4).call(split_training.train, **arguments, folder=folders[2], resume=True), wanted, began=4)


@pytest.mark.slow
def test_a_batch_of_another_size_is_refused(pool_of, tmp_path):
    cluster = write_cluster(tmp_path / "cluster.toml", 2)
    with pytest.raises(RankError, match="a micro-batch has the sizes"):
        pool_of(2).call(split_training.train, model="layers", cluster=cluster, sizes=(8, 4))
