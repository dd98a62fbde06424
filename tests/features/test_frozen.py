"""Modules that a job uses without training them: a teacher, the layers below adapters."""

from copy import deepcopy

import pytest
import torch
from prototypes import Smooth
from torch import nn
from torch.distributed.tensor import DTensor

from shoestring import checkpoint, precision
from shoestring.cli import main
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.feature import Seam
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.parallel import DDP, FSDP
from shoestring.testing import Pool, jobs
from tests.small_jobs import Net, batch, does
from tests.small_jobs import small_job as job


def freezing(module, seam=Seam.MODEL, name="teacher", source="here"):
    """A feature that freezes what `module(attachments)` returns."""
    return does(seam, lambda attachments: attachments.frozen(name, module(attachments), source))


def teacher(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(Net(), nn.Dropout(0.5), nn.BatchNorm1d(4))


def test_a_frozen_module_stays_in_evaluation_mode_and_without_gradients_until_the_job_is_closed():
    own = teacher()
    with compose(job(), [freezing(lambda _: own)]) as composed:
        assert attachments_of(composed).frozen_modules == {"teacher": own}
        own.train()
        assert not any(each.training for each in own.modules())
        assert not any(parameter.requires_grad for parameter in own.parameters())
        assert torch.equal(own(torch.ones(2, 3)), own(torch.ones(2, 3)))  # no dropout, no statistics of batches
        assert len(attachments_of(composed).parameters) == 4  # the model's
    assert all(each.training for each in own.modules()) and "train" not in vars(own)
    assert all(parameter.requires_grad for parameter in own.parameters())


def test_layers_of_the_model_are_frozen_where_train_is_called_on_the_model():
    whole = job()
    with compose(whole, [freezing(lambda attachments: attachments.module.up)]):
        whole.model.train()
        assert whole.model.training and whole.model.down.training and not whole.model.up.training
        before = attachments_of(whole).module.up.weight.clone()
        whole.step(batch())
        assert torch.equal(before, attachments_of(whole).module.up.weight) and list(attachments_of(whole).trained) == [
            "down.weight",
            "down.bias",
        ]


def test_a_checkpoint_holds_a_reference_and_a_hash_in_place_of_frozen_tensors():
    with compose(job(), [freezing(lambda attachments: attachments.module.up, source="hf:base")]) as composed:
        assert list(composed.kept["model"].state.state_dict()) == ["down.weight", "down.bias"]
        assert list(attachments_of(composed).weights()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
        reference = composed.kept["frozen.teacher"].state.state_dict()
        assert reference["source"] == "hf:base" and len(reference["digest"]) == 64


@pytest.mark.parametrize("saver", [checkpoint.Plain, checkpoint.Tiered])
def test_a_checkpoint_is_restored_with_the_same_frozen_tensors_only(tmp_path, saver):
    def run(seed, restore="auto"):
        features = [freezing(lambda _: teacher(seed)), saver(folder=str(tmp_path))]
        with compose(job(total=4), features) as composed:
            step = composed.restore(restore)
            composed.step(batch())
            return step

    assert [run(1), run(1)] == [None, 1]
    with pytest.raises(CheckpointError, match=r"frozen.teacher.* `here` has other weights than `here` had"):
        run(2)


def test_the_layers_below_adapters_are_restored_from_the_model_that_the_run_opens(tmp_path):
    def run(change=0.0):
        whole = job(total=4)
        with torch.no_grad():
            attachments_of(whole).module.up.weight.add_(change)
        features = [freezing(lambda attachments: attachments.module.up), checkpoint.Plain(folder=str(tmp_path))]
        with compose(whole, features) as composed:
            step = composed.restore("auto")
            composed.step(batch())
            return step, {name: value.clone() for name, value in attachments_of(composed).weights().items()}

    _, first = run()
    step, second = run()
    assert step == 1 and torch.equal(first["up.weight"], second["up.weight"])
    assert not torch.equal(first["down.weight"], second["down.weight"])
    with pytest.raises(CheckpointError, match="has other weights"):
        run(change=1.0)


def test_a_teacher_runs_under_the_autocast_of_the_job():
    seen = []

    def distil(attachments):
        inner = attachments.loss

        def loss(output, batch):
            seen.append(attachments.forward(attachments.frozen_modules["teacher"], batch).dtype)
            return inner(output, batch)

        attachments.loss = loss

    features = [freezing(lambda _: Net()), does(Seam.LOSS, distil), precision.Autocast(dtype="bf16")]
    with compose(job(), features) as composed:
        composed.step(batch())
    assert seen == [torch.bfloat16]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(lambda model: nn.Sequential(model.embedding, nn.Linear(3, 3)), id="a teacher on the embedding"),
        pytest.param(lambda model: model.head, id="a tied layer"),
        pytest.param(lambda model: model, id="the model"),
        pytest.param(lambda model: nn.Sequential(model), id="around the model"),
    ],
)
def test_what_shares_trained_parameters_is_refused(shared):
    model = Tied()
    with pytest.raises(ConfigError, match=r"`test.does`: `teacher` shares parameters that the model trains"):
        compose(Job(model, world=World()), [freezing(lambda _: shared(model))])
    assert model.head.training and model.head.weight.requires_grad
    with compose(Job(model, world=World()), [freezing(lambda _: deepcopy(shared(model)))]):  # a copy is its own
        pass


def test_it_is_too_late_once_the_model_is_sharded():
    with pytest.raises(ConfigError, match="freezes `teacher` after the model was sharded"):
        compose(job(), [freezing(lambda _: Net(), Seam.SHARD)])
    with compose(job(), []) as composed, pytest.raises(ConfigError, match="`the program` freezes"):
        attachments_of(composed).frozen("teacher", Net(), "here")
    for source in ("", None):
        with pytest.raises(ConfigError, match=f"has the source {source!r} .*open_model"):
            compose(job(), [freezing(lambda _: Net(), source=source)])
    with pytest.raises(ConfigError, match=r"under the name `frozen.teacher`"):
        compose(job(), [freezing(lambda _: Net()), freezing(lambda _: Net())])


# -- on two ranks ------------------------------------------------------------------------------------------------------


def sharded(folder):
    """What the teacher's parameters are under FSDP, and the loss of a step under FSDP and under DDP."""
    losses, kinds = [], set()
    for owner in (FSDP(), DDP()):
        whole = Job(jobs.tiny(), optimizer=jobs.sgd(), world=World.current())
        with compose(whole, [Smooth(), owner]) as composed:
            if isinstance(owner, FSDP):
                frozen = attachments_of(composed).frozen_modules["teacher"]
                kinds = {isinstance(parameter, DTensor) for parameter in frozen.parameters()}
            number, size = composed.world.rank, composed.world.size
            losses += [float(composed.step(jobs.batch(step, number, size))) for step in range(2)]
    return [sorted(kinds), losses]


def differing():
    world = World.current()
    try:
        compose(Job(Net(), world=world), [freezing(lambda _: teacher(world.rank)), DDP()])
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_fsdp_shards_a_teacher_and_ranks_must_have_the_same_one(tmp_path):
    with Pool(2, timeout=60) as pool:
        for kinds, losses in pool.call(sharded, folder=str(tmp_path)):
            assert kinds == [True]
            assert losses[:2] == pytest.approx(losses[2:], abs=1e-6)
        assert pool.call(differing) == ["the frozen module `teacher` from `here` differs between ranks"] * 2


def test_a_checkpoint_that_refers_to_layers_of_the_model_is_not_exported_without_them(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    with compose(
        job(), [freezing(lambda attachments: attachments.module.up), checkpoint.Tiered(folder=str(folder))]
    ) as composed:
        composed.step(batch())
    assert main(["checkpoint", "export", str(folder), "--to", str(tmp_path / "out"), "--as", "safetensors"]) == 2
    assert "only refers to `up.weight`" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
