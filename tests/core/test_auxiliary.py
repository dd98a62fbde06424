"""What a model returns beside its logits is trained as the model has it, or refused."""

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import cross_entropy
from shoestring.memory import ChunkedLoss


class Routed(nn.Module):
    """A model whose output has an auxiliary loss, the mean over its tokens of a number of each."""

    def __init__(self, name="aux_loss", **factors):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.name = nn.Embedding(11, 8), nn.Linear(8, 11), name
        self.config = SimpleNamespace(**factors)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        return SimpleNamespace(logits=self.head(hidden), loss=None, **{self.name: hidden.square().mean()})


def ragged(counts):
    generator = torch.Generator().manual_seed(7)
    for count in counts:
        x, y = torch.randint(11, (2, 2, 12), generator=generator)
        y.view(-1)[count:] = -100
        yield x, y


@pytest.mark.parametrize("counts", [[24], [24, 24], [24, 3, 0, 9]])
def test_an_auxiliary_loss_is_trained_with_the_models_factor_and_not_evaluated(counts):
    model = Routed(router_aux_loss_coef=5.0)
    before = copy.deepcopy(model)
    with compose(Job(model, optimizer=partial(torch.optim.SGD, lr=0.5)), []) as job:
        batches = list(ragged(counts))
        found = job.step(*batches)
        total = sum(
            F.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="sum") + 5 * out.aux_loss * (y >= 0).sum()
            for x, y in batches
            for out in [before(x)]
        ) / sum(counts)
        total.backward()
        torch.testing.assert_close(found, total.detach())
        for one, other in zip(model.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(one, other - 0.5 * other.grad)
        held_out, count = job.evaluate(batches)
        wanted = sum(F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), reduction="sum") for x, y in batches)
        assert held_out / count == pytest.approx(float(wanted) / sum(counts), rel=1e-6)


@pytest.mark.parametrize("model", [Routed(), Routed("balance", router_aux_loss_coef=1.0)])
def test_an_auxiliary_loss_of_unknown_weight_is_refused_unless_the_loss_is_the_users(model):
    with compose(Job(model), []) as job, pytest.raises(ConfigError, match=f"returns `{model.name}` beside its logits"):
        job.step(*ragged([24]))
    own = lambda output, batch: cross_entropy(output, batch)  # noqa: E731
    with compose(Job(model, loss=own), []) as job:
        found, (batch,) = job.step(*ragged([24])), ragged([24])
    assert found > 0 and batch


@pytest.mark.slow
def test_a_mixture_of_transformers_trains_its_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=5.0,
    )  # fmt: skip
    for features in ([], [ChunkedLoss(tokens=8)]):
        torch.manual_seed(0)
        model, ids = transformers.MixtralForCausalLM(config), torch.randint(64, (2, 16))
        wanted = model(input_ids=ids, labels=ids)
        with compose(Job(model, optimizer=partial(torch.optim.SGD, lr=0.0)), features) as job:
            found = job.step({"input_ids": ids, "labels": ids})
        torch.testing.assert_close(found, wanted.loss.detach())
        assert found > wanted.aux_loss


class Slotted(NamedTuple):
    logits: torch.Tensor
    aux_loss: torch.Tensor


@dataclass(slots=True)
class WithSlots:
    logits: torch.Tensor
    aux_loss: torch.Tensor


class Mapped(dict):
    @property
    def logits(self):
        return self["logits"]


class Shaped(Routed):
    """The same output in another form, or with another form of its loss."""

    def __init__(self, form, shape=lambda loss: loss):
        super().__init__(router_aux_loss_coef=5.0)
        self.form, self.shape = form, shape

    def forward(self, inputs):
        output = super().forward(inputs)
        return self.form(logits=output.logits, aux_loss=self.shape(output.aux_loss))


@pytest.mark.parametrize("form", [Slotted, WithSlots, Mapped, SimpleNamespace])
def test_it_is_trained_whatever_the_form_of_the_output(form):
    losses = []
    for model in (Routed(router_aux_loss_coef=5.0), Shaped(form)):
        with compose(Job(model), []) as job:
            losses.append(float(job.step(*ragged([24]))))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("shape", [lambda loss: torch.stack([loss, loss]), lambda loss: (loss, loss)])
@pytest.mark.parametrize("form", [Slotted, SimpleNamespace])
def test_a_loss_that_is_not_one_number_is_refused(form, shape):
    with (
        pytest.raises(ConfigError, match=r"returns `aux_loss` (of shape|as a tuple).*, which is not one number"),
        compose(Job(Shaped(form, shape)), []) as job,
    ):
        job.step(*ragged([24]))
