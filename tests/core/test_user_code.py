"""What people bring: batches, losses, optimizers and features of their own. Each works, or is refused in one line."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoestring import optim, parallel
from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import call_model, cross_entropy
from shoestring.core.world import World
from shoestring.data.loader import sweep
from shoestring.testing.pool import Pool
from shoestring.training.data_loading import to_device


def model(words=11):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(words, 8), nn.Linear(8, words))


def tokens(rows=2, length=6):
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(1))


def pair():
    return {"inputs": tokens()[:, :-1], "targets": tokens()[:, 1:]}


def job(**arguments):
    arguments = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)} | arguments
    return compose(Job(model(), world=World(), **arguments))


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: loss, r"a Tensor of shape \(\)"),
        (lambda loss: (loss, None), "a tuple of Tensor and NoneType"),
        (lambda loss: (loss.expand(3), torch.tensor(3)), r"a total of shape \(3,\)"),
        (lambda loss: {"loss": loss}, "a dict"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused_in_one_line(result, message):
    made = job(loss=lambda output, batch: result(output.mean()))
    for use in (lambda: made.step(pair()), lambda: made.evaluate([pair()])):
        with pytest.raises(ConfigError, match=f"the loss returned {message}, not \\(sum, count\\)") as caught:
            use()
        assert "number of targets" in caught.value.hint


def test_a_count_may_be_a_number():
    losses = [
        job(loss=lambda output, batch, kind=kind: (output.sum(), kind(10))).step(pair()) for kind in (int, torch.tensor)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("shape", [(2, 4, 11), (2, 11, 5), (10, 11), (2, 5)])
def test_logits_that_do_not_fit_the_targets_are_refused_in_one_line(shape):
    made = job(forward=lambda module, batch: module(batch["inputs"]).sum() + torch.zeros(shape))
    with pytest.raises(ConfigError, match=r"logits of shape \(.*\) do not fit targets of shape \(2, 5\)"):
        made.step(pair())


def test_an_output_without_logits_is_refused_in_one_line():
    made = job(forward=lambda module, batch: (module(batch["inputs"]),))
    with pytest.raises(ConfigError, match="the model returned a tuple, neither logits nor an object with"):
        made.step(pair())


# -- batches -----------------------------------------------------------------------------------------------------------


class KeepsArguments(nn.Module):
    """Answers as models of transformers do, and remembers what it was called with."""

    def __init__(self):
        super().__init__()
        self.inside, self.seen = model(), {}

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        self.seen = {"attention_mask": attention_mask, "position_ids": position_ids}
        return type("Output", (), {"logits": self.inside(input_ids)})()


def test_labels_are_shifted_as_transformers_does():
    ids, masked = tokens(), KeepsArguments()
    labels = ids.clone()
    labels[0, 4:] = -100
    mask = (labels != -100).long()
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "ids": torch.arange(2)}
    total, count = cross_entropy(call_model(masked, batch), batch)
    logits = masked.inside(ids)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert count == 8 and torch.allclose(total, expected)
    assert masked.seen["attention_mask"] is mask and masked.seen["position_ids"] is None


def test_labels_of_whole_samples_are_not_shifted():
    logits, labels = torch.randn(4, 11), torch.tensor([3, 1, 4, 1])
    total, count = cross_entropy(logits, {"input_ids": tokens(4), "labels": labels})
    assert count == 4 and torch.allclose(total, F.cross_entropy(logits, labels, reduction="sum"))


def test_a_batch_in_either_style_trains_alike():
    ids = tokens()
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    losses = [job().step(batch) for batch in ({"input_ids": ids, "labels": ids}, {"inputs": ids, "targets": shifted})]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": tokens()}, "the batch has neither `inputs` nor `input_ids`"),
        ({"inputs": tokens()}, "the batch has neither `targets` nor `labels`"),
        ({"input_ids": [tokens()[0]], "labels": tokens()}, "`input_ids` of the batch is a list"),
        (
            {"input_ids": tokens(), "labels": tokens(), "attention_mask": tokens()},
            "`Sequential` takes no `attention_mask`",
        ),
        (tokens(), "the batch is a Tensor"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused_in_one_line(batch, message):
    with pytest.raises(ConfigError, match=message):
        job().step(batch)


def test_mappings_that_are_no_dicts_are_batches_too():
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": tokens(), "labels": tokens()})
    there = to_device(encoding, torch.device("cpu"))
    assert torch.equal(job().step(there), job().step(dict(encoding)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_of_a_sweep_counts_each_sample_once_on_any_number_of_ranks(size):
    rows, found = [{"input_ids": row, "labels": row.clone()} for row in tokens(3)], [0.0, 0]
    for rank in range(size):
        counted = job().evaluate(sweep(rows, batch=2, rank=rank, size=size))
        found = [one + other for one, other in zip(found, counted, strict=True)]
    total, count = cross_entropy(model()(tokens(3)), {"input_ids": tokens(3), "labels": tokens(3)})
    assert found == pytest.approx([float(total), int(count)]) and found[1] == 15


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_exists_steps_the_model():
    built, by_instance = model(), model()
    first = compose(Job(built, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), world=World()))
    optimizer = torch.optim.SGD(by_instance.parameters(), lr=0.1)
    second = compose(Job(by_instance, optimizer=optimizer, world=World()), [optim.Clip(max_norm=1e9)])
    assert torch.equal(first.step(pair()), second.step(pair())) and second.optimizer is optimizer
    assert all(torch.equal(*both) for both in zip(built.parameters(), by_instance.parameters(), strict=True))


def test_a_factory_that_returns_no_optimizer_is_refused():
    with pytest.raises(ConfigError, match="`optimizer` returned a list, not a torch"):
        compose(Job(model(), optimizer=list, world=World()))


@pytest.mark.parametrize("by_name", [False, True])
def test_features_see_the_gradients_of_a_closure(by_name):
    """torch calls a closure behind the hooks of `step`; a clip there would clip what the step before has left."""
    ends = []
    for closed in (False, True):
        torch.manual_seed(0)
        plain, batch, losses = model(), tokens(), []
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        attach(plain, optimizer, optim.Clip(max_norm=1e-3))

        def backward(plain=plain, optimizer=optimizer, batch=batch, losses=losses):
            optimizer.zero_grad()
            loss = 100 * plain(batch).square().sum()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(3):
            if not closed:
                backward()
                optimizer.step()
            else:
                loss = optimizer.step(closure=backward) if by_name else optimizer.step(backward)
                assert loss.item() == losses[-1]
        ends.append((plain[1].weight, losses))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_features_run_in_a_loop_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = model()
    prepared, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    made = attach(prepared, optimizer, optim.Clip(max_norm=1e-3))
    before = plain[1].weight.detach().clone()
    for _ in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(100 * prepared(tokens()).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    assert made.progress.step == 2  # every other call of `step` only accumulates
    assert 0 < (plain[1].weight - before).norm() <= 2 * 0.1 * 1e-3 * 1.001
    accelerator.free_memory()


# -- features ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "message", "hint"),
    [
        (optim.Clip, "`Clip` is a class, not settings", "write `Clip()`"),
        ("optim.clip", "str is no feature", "such as `optim.Clip()`"),
    ],
)
def test_what_is_no_feature_is_refused_in_one_line(feature, message, hint):
    built = model()
    for use in (
        lambda: compose(Job(built, world=World()), [feature]),
        lambda: attach(built, torch.optim.SGD(built.parameters(), lr=0.1), feature),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            use()
        assert hint in caught.value.hint


# -- DDP ---------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """One of its layers is never used."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = model(), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.used(inputs)


def unused(find):
    torch.manual_seed(0)
    world = World(rank=dist.get_rank(), size=2, local_rank=dist.get_rank(), local_size=2)
    features = [parallel.DDP(find_unused=find)]
    with compose(Job(Branches(), world=world), features) as made:
        before = attachments_of(made).module.used[1].weight.detach().clone()
        try:
            for _ in range(2):
                made.step(pair())
        except ConfigError as error:
            return str(error), error.hint, torch.equal(before, attachments_of(made).module.used[1].weight)
        return "", "", made.progress.step == 2


@pytest.mark.slow
def test_parameters_that_no_step_uses_are_named_before_ddp_steps():
    with Pool(2, timeout=60) as pool:
        for message, hint, unchanged in pool.call(unused, find=False):
            assert "`spare.weight` and 1 more got no gradient" in message
            assert "find_unused" in hint and unchanged
        assert pool.call(unused, find=True) == [["", "", True]] * 2
