"""What is measured of a model: weights, activations that autograd holds, and blocks of equal shapes once."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.feature import arrange_mesh, resolve_all
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import AdamW, AdamW8bit
from shoestring.parallel import Pipeline, Tensor
from shoestring.planner.measure import _Measuring, measure_sizes
from shoestring.planner.search import as_trained
from shoestring.planning.predict import peaks
from shoestring.planning.step import planned_step
from shoestring.run import parse
from shoestring.verbs.check import check

SHAPE = {"vocab_size": 64, "dim": 32, "layers": 3, "heads": 2, "kv_heads": 2, "hidden": 64, "context": 16}


@contextmanager
def measured(model, batch_of, sizes=(2, 4), features=()):
    with compose(Job(model), features or [AdamW()]) as job:
        measuring = _Measuring(job, World())
        for size in sizes:
            measuring.measure(batch_of(size), size)
        yield measuring.costs(tuple(sizes)), job


def tokens(samples):
    text = torch.arange(samples * 17).view(samples, 17) % 64
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def held_by(job, batch):
    """Bytes of all tensors but weights that autograd holds of a pass."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*job.model.parameters(), *job.model.buffers())}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = job.model(batch["inputs"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    del loss
    return sum(nbytes for _, nbytes in found.values())


@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_a_gpt_are_the_whole(tied):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, tied=tied))
    with measured(model, tokens) as (costs, job):
        assert costs.trained == sum(parameter.nbytes for parameter in model.parameters())
        assert costs.tied == (64 * 32 * 4 if tied else 0)
        assert costs.hidden == (16 * 32 * 4,) * 4
        assert costs.scored == 16 * 64 * 4
        assert costs.state == pytest.approx(2.0, rel=0.01)  # both moments of AdamW
        for place, size in enumerate(costs.samples):
            parts = [*costs.blocks, costs.before, costs.behind]
            held = sum(part.held[place] for part in parts)
            assert held == pytest.approx(held_by(job, tokens(size)), rel=0.1)
            assert all(part.forward[place] > 0 for part in parts)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert "forward" not in vars(model.blocks[0])  # nothing stays patched


@pytest.mark.slow
def test_blocks_of_equal_shapes_are_measured_once():
    with measured(GPT(GPTConfig(**SHAPE)), tokens) as (costs, _):
        assert costs.blocks[0] == costs.blocks[2]


@pytest.mark.slow
def test_optimizer_state_is_what_the_optimizer_holds():
    wide = SHAPE | {"dim": 128, "hidden": 256}  # small tensors keep their precision
    with measured(GPT(GPTConfig(**wide)), tokens, features=[AdamW8bit()]) as (costs, _):
        assert costs.state < 1


class Plain(nn.Module):
    """A model without repeated blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(17, 9), nn.Linear(9, 5)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Widening(nn.Module):
    """A model whose blocks return another shape than they get."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(17, 9), nn.Linear(9, 5)])
        self.behind = nn.Linear(5, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


class Twice(Widening):
    """A model that calls a block twice."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layers[1](nn.functional.pad(x, (0, 4)))


def images(size):
    return {"inputs": torch.randn(size, 17), "targets": torch.arange(size) % 5}


@pytest.mark.slow
def test_blocks_may_return_another_shape_than_they_get():
    with measured(Widening(), images) as (costs, _):
        assert costs.hidden == (17 * 4, 9 * 4, 5 * 4)
        assert [block.trained for block in costs.blocks] == [18 * 9 * 4, 10 * 5 * 4]
        assert costs.behind.trained == 30 * 4
        assert costs.behind.held[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, Twice])
def test_a_model_without_blocks_in_a_row_is_one_part(kind):
    model = kind()
    with measured(model, images) as (costs, _):
        assert costs.blocks == ()
        assert costs.trained == costs.behind.trained == sum(parameter.nbytes for parameter in model.parameters())
        assert costs.behind.backward[-1] > 0


@pytest.mark.slow
def test_a_job_is_left_as_it_was():
    model = GPT(GPTConfig(**SHAPE))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with measured(model, tokens) as (_, job):
        assert isinstance(job, Job)
        assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def planned_like(model, features, world):
    """Attachments of a job with a model on the meta device, as `check` has them."""
    with torch.device("meta"):
        job = Job(GPT(GPTConfig(**model)), world=world)
    attachments = attachments_of(job)
    attachments.features = resolve_all(features, world)
    return attachments


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit])
@pytest.mark.parametrize("tied", [True, False])
def test_fake_tensors_have_the_sizes_that_are_measured(tied, optimizer):
    shape = SHAPE | {"tied": tied, "dim": 128}
    with measured(GPT(GPTConfig(**shape)), tokens, sizes=(4,), features=[optimizer()]) as (real, _):
        fake = measure_sizes(planned_like(shape, [optimizer()], World()), None, (4, 16))
    for name in ("hidden", "tied", "scored", "state", "trained", "samples"):
        assert getattr(fake, name) == pytest.approx(getattr(real, name)), name
    for one, other in zip(
        [*fake.blocks, fake.before, fake.behind], [*real.blocks, real.before, real.behind], strict=True
    ):
        assert (one.trained, one.frozen) == (other.trained, other.frozen)
        assert one.held == pytest.approx(other.held, rel=0.01)  # kernels keep some numbers of their own


@pytest.mark.slow
@pytest.mark.parametrize("features", [[Pipeline()], [Tensor()], [Pipeline(stages=2), Tensor(ways=2)]])
def test_the_memory_of_parts_is_that_of_the_plan_with_the_cuts_of_training(features):
    world = arrange_mesh(World(size=4, local_size=4) if len(features) > 1 else World(size=2, local_size=2), features)
    attachments = planned_like(SHAPE | {"layers": 4}, [AdamW(), *features], world)
    settled = as_trained(attachments.features, attachments.module, world)
    with measured(GPT(GPTConfig(**SHAPE | {"layers": 4})), tokens, sizes=(2,)) as (real, _):
        by_measuring = peaks(planned_step(world, settled, real, batch=8, micro=4)[0])
    costs = measure_sizes(attachments, None, (2, 16))
    assert peaks(planned_step(world, settled, costs, batch=8, micro=4)[0]) == pytest.approx(by_measuring, rel=0.01)
    cuts = [one.cuts for one in settled if isinstance(one, Pipeline)]
    assert cuts in ([], [(2,)])


@pytest.mark.parametrize(
    "table", [{"pipeline": {}}, {"tensor": {}}, {"pipeline": {"stages": 2}, "tensor": {"ways": 2}}]
)
def test_check_predicts_the_memory_of_splits(table):
    run = {"model": "shoestring.models.gpt:tiny", "data": "tests.planner.test_plans:texts", "batch": 16, "steps": 2}
    tables = {"run": run | {"accumulate": 4}, "model": SHAPE | {"layers": 4}, "parallel": table}
    lines = list(check(parse(tables), 4 if len(table) > 1 else 2))
    (line,) = (line for line in lines if line.startswith("sum for a rank"))
    assert "predicted from the sizes of its tensors, because parallel." in line
    stages = [line for line in lines if "stage 0 " in line]
    assert bool(stages) == ("pipeline" in table) and all("stage 1 " in line for line in stages)
