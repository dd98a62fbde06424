"""Losses over the whole batch: any number of ranks and micro-batches computes what one process does in one pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import Repeated
from shoestring.core.world import World
from shoestring.testing import Pool
from tests.core.pipeline_ranks import Pipeline, TwoStages

SAMPLES, WIDTH = 8, 6


class Towers(nn.Module):
    """Two encoders; with dropout, and with a buffer that each training pass changes."""

    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 4))
        self.drop, self.norm = nn.Dropout(dropout), nn.BatchNorm1d(4) if norm else nn.Identity()
        self.temperature = nn.Parameter(torch.tensor(0.5).log())

    def forward(self, batch):
        left, right = self.norm(self.drop(self.left(batch["left"]))), self.right(batch["right"])
        rows = F.normalize(left, dim=-1), F.normalize(right, dim=-1)
        return {"rows": rows, "temperature": self.temperature.exp(), "nothing": None}


def call(model, batch):
    return model(batch)


@ss.whole_batch
def contrastive(output, batch):
    (left, right), temperature = output["rows"], output["temperature"]
    scores, own = left @ right.T / temperature, torch.arange(len(left))
    assert set(batch) == {"weight"} and batch["weight"].shape == (len(left),)
    losses = F.cross_entropy(scores, own, reduction="none") + F.cross_entropy(scores.T, own, reduction="none")
    return (losses * batch["weight"]).sum() / 2, batch["weight"].sum()


def unmarked(output, batch):
    return contrastive(output, {"weight": batch["weight"]})


def batch_of(indices, width=WIDTH):
    draw = torch.Generator().manual_seed(3)
    left, right = (torch.randn(64, width, generator=draw) for _ in range(2))
    at = torch.as_tensor(list(indices))
    return {"left": left[at], "right": right[at] + left[at], "weight": 1.0 + at % 3}


def job(features=(), *, dropout=0.0, norm=False, world=None, loss=contrastive, dtype=torch.float64):
    torch.manual_seed(0)
    model = Towers(dropout, norm).to(dtype)
    features = (ss.optim.SGD(lr=0.5), *features)
    return ss.compose(Job(model, call, loss, world=world or World.current()), features)


def in_double(batch):
    return {name: value.double() for name, value in batch.items()}


def trained(made, steps, parts, **evaluated):
    """Losses of steps of which each takes `parts(step)`, and the parameters after them."""
    losses = [float(made.step(*map(in_double, parts(step)))) for step in range(steps)]
    return losses, [value.tolist() for value in made.model.parameters()]


def alone(steps, samples=SAMPLES):
    return trained(job(), steps, lambda step: [batch_of(range(step, step + samples))])


def close(found, wanted):
    losses, parameters = found
    assert losses == pytest.approx(wanted[0], rel=1e-9)
    for one, other in zip(parameters, wanted[1], strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-8, atol=1e-10)


@settings(max_examples=10)
@given(st.sampled_from([(8,), (4, 4), (2, 6), (1, 3, 4), (1,) * 8]))
def test_micro_batches_compute_what_one_pass_does(sizes):
    """Also where they differ in size."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]

    def parts(step):
        return [batch_of(range(step + start, step + start + size)) for start, size in zip(starts, sizes, strict=True)]

    close(trained(job(), 3, parts), alone(3))


def on_ranks(accumulate, features):
    rank, size = dist.get_rank(), dist.get_world_size()
    made, part = job(features=[getattr(ss.parallel, features)()]), SAMPLES // (size * accumulate)

    def parts(step):
        starts = [step + (micro * size + rank) * part for micro in range(accumulate)]
        return [batch_of(range(start, start + part)) for start in starts]

    result = trained(made, 3, parts)
    tokens = made.progress.tokens
    made.close()
    return result, tokens


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_ranks_compute_what_one_process_does(ranks, accumulate):
    weights = sum(int(batch_of(range(step, step + SAMPLES))["weight"].sum()) for step in range(3))
    with Pool(ranks, timeout=100) as pool:
        for result, tokens in pool.call(on_ranks, accumulate=accumulate, features="DDP"):
            close(result, alone(3))
            assert tokens == weights


def evaluated_on_ranks(samples):
    rank, size = dist.get_rank(), dist.get_world_size()
    made = job(features=[ss.parallel.DDP()])
    from shoestring.data.loader import shares

    parts = (
        Repeated(in_double(batch_of(ids))) if repeated else in_double(batch_of(ids))
        for ids, repeated in shares(samples, 8, rank, size)
    )
    return made.evaluate(parts)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_ranks_without_samples_add_no_rows(samples):
    """In the last round of an evaluation: 4 ranks and fewer samples, or parts of unequal sizes."""
    wanted = job().evaluate([in_double(batch_of(range(samples)))])
    with Pool(4, timeout=100) as pool:
        for found in pool.call(evaluated_on_ranks, samples=samples):
            assert found == pytest.approx(wanted, rel=1e-9)


def test_both_passes_see_the_same_random_numbers_and_buffers():
    """With dropout, and a norm whose statistics and output depend on what passes before did."""
    outputs = []

    def watched(model, batch):
        output = call(model, batch)
        outputs.append(output["rows"][0].detach().clone())
        return output

    made = job(dropout=0.5, norm=True)
    attachments_of(made).forward = watched
    made.model.train()
    made.step(*(in_double(batch_of(range(start, start + 4))) for start in (0, 4)))
    first, second, first_again, second_again = outputs
    assert torch.equal(first, first_again) and torch.equal(second, second_again) and not torch.equal(first, second)
    assert int(made.model.norm.num_batches_tracked) == 2


def test_a_loss_that_is_not_marked_would_lose_negatives():
    """What the mark is for: the fault that it prevents."""
    found = trained(job(loss=unmarked), 1, lambda step: [batch_of(range(4)), batch_of(range(4, 8))])[0]
    assert found[0] < 0.8 * alone(1)[0][0]


def test_with_fp16_scaling_nothing_changes():
    """The loss is scaled before the first backward pass, and gradients are unscaled once."""
    parts = [batch_of(range(4)), batch_of(range(4, 8))]
    made = job()
    attachments = attachments_of(made)
    attachments.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=True)
    found = trained(made, 2, lambda step: parts if step == 0 else [batch_of(range(1, 9))])
    close(found, alone(2))


@ss.whole_batch
def of_text(output, batch):
    return torch.zeros(()), 1


def test_outputs_without_rows_are_refused():
    for output in (None, "text", torch.zeros(()), object()):
        made = ss.compose(Job(nn.Linear(1, 1), lambda model, batch, value=output: value, of_text, world=World()))
        with pytest.raises(ConfigError, match="without rows, and the loss is over the whole batch"):
            made.step({"inputs": torch.zeros(1, 1)})


def of_different_widths():
    made = ss.compose(
        Job(nn.Linear(1, 1), lambda model, batch: model(batch["rows"]).expand(2, batch["width"]), of_text),
        [ss.parallel.DDP()],
    )
    with pytest.raises(ConfigError, match="rows of the outputs have different sizes on different ranks"):
        made.step({"rows": torch.zeros(2, 1), "width": 3 + dist.get_rank()})


def in_stages():
    with pytest.raises(ConflictError, match="runs micro-batches one by one"):
        ss.compose(Job(TwoStages(), loss=of_text), [Pipeline()])


@pytest.mark.slow
def test_ranks_refuse_alike():
    with Pool(2, timeout=100) as pool:
        pool.call(of_different_widths)
        pool.call(in_stages)


def test_adascale_is_refused():
    with pytest.raises(ConfigError, match="compares gradients of parts of a batch"):
        job(features=[ss.optim.AdaScale(consecutive=True, scale=2.0)])


def test_one_rank_and_one_micro_batch_is_the_plain_loss_bit_by_bit():
    plain, marked = job(loss=unmarked), job()
    for step in range(3):
        batch = in_double(batch_of(range(step, step + 8)))
        assert torch.equal(plain.step(batch), marked.step(batch))
