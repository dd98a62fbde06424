"""The loss in chunks against torch's own, and in models whose heads make what it leaves out."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import IGNORED
from shoestring.core.world import World
from shoestring.decode import Distill
from shoestring.memory import ChunkedLoss, LoRA, Recompute, chunked_loss
from shoestring.memory.chunked_loss import chunked_cross_entropy
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.precision import Autocast


def drawn(dtype=torch.float64, bias=True, count=(3, 7), width=6, words=11):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()  # noqa: E731
    targets = torch.randint(words, count, generator=generator)
    targets[0, :3] = IGNORED
    return (make(*count, width), make(words, width), make(words) if bias else None), targets


@pytest.mark.parametrize("tokens", [1, 4, 21, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_torch(tokens, bias):
    (hidden, weight, offset), targets = drawn(bias=bias)
    inputs = [each for each in (hidden, weight, offset) if each is not None]
    logits = F.linear(hidden, weight, offset)
    expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    found = chunked_cross_entropy(hidden, weight, offset, targets, tokens)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected / 7, inputs)
    for one, other in zip(torch.autograd.grad(found / 7, inputs), wanted, strict=True):
        torch.testing.assert_close(one, other)


def differences(module, tokens):
    """Largest differences to torch's gradients where ignored targets reach the chunks, as they do on a GPU."""
    (hidden, weight, offset), targets = drawn()
    logits = F.linear(hidden, weight, offset)
    expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    flat = hidden.flatten(0, -2), weight, offset, targets.flatten(), tokens, torch.float64
    found = module._ChunkedCrossEntropy.apply(*flat)
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(each, (hidden, weight, offset)) for each in (found, expected))
    return [float((one - other).abs().max()) for one, other in zip(*pairs, strict=True)]


@pytest.mark.parametrize("tokens", [1, 2, 4, 100])
def test_ignored_targets_give_no_gradient_where_they_reach_the_chunks(tokens):
    assert max(differences(chunked_loss, tokens)) < 1e-12


def test_a_backward_pass_without_its_mask_is_seen(monkeypatch):
    source, mask = Path(chunked_loss.__file__).read_text(), "d_logits.masked_fill_(~counted[:, None], 0)"
    assert source.count(mask) == 1
    mutant = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    exec(source.replace(mask, "pass"), vars(mutant))
    assert min(differences(mutant, 4)) > 1e-3


@pytest.mark.parametrize("wrong", [-1, -99, -101, 11, 2**40])
@pytest.mark.parametrize("chunks_alone", [False, True])
def test_a_target_that_is_no_class_is_an_error_as_in_torch(wrong, chunks_alone):
    (hidden, weight, offset), targets = drawn()
    targets[1, 2] = wrong
    with pytest.raises(IndexError):
        F.cross_entropy(F.linear(hidden, weight, offset).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        if chunks_alone:  # as on an accelerator, where the device says it
            flat = hidden.flatten(0, -2), weight, offset, targets.flatten(), 4, torch.float64
            chunked_loss._ChunkedCrossEntropy.apply(*flat)
        else:
            chunked_cross_entropy(hidden, weight, offset, targets, 4)


def test_what_is_not_finite_where_no_target_counts_changes_nothing():
    """Also where ignored targets reach the chunks, as they do on a GPU."""
    (hidden, weight, offset), targets = drawn()
    wanted = chunked_cross_entropy(hidden, weight, offset, targets, 4)
    with torch.no_grad():
        hidden[0, 1] = float("nan")
    flat = hidden.flatten(0, -2), weight, offset, targets.flatten(), 4, torch.float64
    for found in (
        chunked_cross_entropy(hidden, weight, offset, targets, 4),
        chunked_loss._ChunkedCrossEntropy.apply(*flat),
    ):
        torch.testing.assert_close(found, wanted)
    (of_hidden,) = torch.autograd.grad(found, [hidden])
    assert not of_hidden[0, 1].any()


def test_nothing_of_the_size_of_all_logits_is_held():
    inputs, targets = drawn(torch.float32, count=(4, 64), words=512)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            sizes.append(output.numel() if isinstance(output, torch.Tensor) else 0)
            return output

    with Watch():
        chunked_cross_entropy(*inputs, targets, 16).backward()
    assert max(sizes) <= max(16 * 512, 512 * 6)


def test_a_frozen_head_gets_no_gradient_and_what_no_target_counts_gives_zero():
    (hidden, weight, _), targets = drawn()
    total = chunked_cross_entropy(hidden, weight.detach(), None, targets, 4)
    total.backward()
    assert hidden.grad is not None and not hidden.grad[0, :3].any() and hidden.grad[1:].all()
    nothing = chunked_cross_entropy(hidden, weight, None, torch.full_like(targets, IGNORED), 4)
    assert nothing.item() == 0
    nothing.backward()
    assert not weight.grad.any()


# -- in models ---------------------------------------------------------------------------------------------------------


def gpt(tied=True):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, dim=16, hidden=24, layers=2, heads=2, kv_heads=1, context=32, tied=tied))


def hf_model(kind="Llama", **changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False}
    config = getattr(transformers, f"{kind}Config")(**shape | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batches(form):
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    if form == "labels":
        return {"input_ids": tokens, "labels": tokens.clone()}
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def trained(model, *features, form="targets", steps=4):
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.2)  # noqa: E731
    with compose(Job(model, optimizer=sgd, world=World()), features) as job:
        losses = [float(job.step(batches(form))) for _ in range(steps)]
        total, count = job.evaluate([batches(form)])
        return [*losses, total / count]


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (gpt, "targets"),
        (lambda: gpt(tied=False), "labels"),
        (hf_model, "labels"),
        (lambda: hf_model(tie_word_embeddings=True), "labels"),
    ],
    ids=["tied gpt", "gpt", "llama", "tied llama"],
)
@pytest.mark.parametrize("more", [(), (Recompute(), LoRA(rank=2))], ids=["", "lora"])
def test_training_is_as_without_it(make, form, more):
    wanted = trained(make().double(), *more, form=form)
    assert trained(make().double(), ChunkedLoss(tokens=5), *more, form=form) == pytest.approx(wanted, abs=1e-7)
    assert abs(wanted[0] - wanted[-1]) > 1e-3
    close = trained(make(), *more, form=form, steps=1)
    assert trained(make(), ChunkedLoss(tokens=5), *more, form=form, steps=1) == pytest.approx(close, abs=1e-6)


def test_it_takes_nothing_for_good():
    model = gpt()
    before = [dict(vars(module)) for module in model.modules()]
    forward = None
    with compose(Job(model, world=World()), [ChunkedLoss()]) as job:
        job.step(batches("targets"))
        forward = attachments_of(job).forward
        with pytest.raises(ConfigError, match=r"tokens of the shape \(2, 16\) reach the head"):
            job.step(batches("targets") | {"targets": torch.zeros(2, 3, dtype=torch.int64)})
    assert [dict(vars(module)) for module in model.modules()] == before
    assert attachments_of(job).forward != forward


def test_under_autocast_it_is_as_close_as_that_is():
    wanted = trained(gpt(), Autocast(dtype="bf16"))
    assert trained(gpt(), Autocast(dtype="bf16"), ChunkedLoss(tokens=5)) == pytest.approx(wanted, abs=2e-3)


def test_a_model_that_changes_its_logits_is_refused():
    with pytest.raises(ConfigError, match="changes its logits after the head"):
        trained(hf_model("Gemma2", final_logit_softcapping=3.0, head_dim=8), ChunkedLoss(), form="labels")


def test_what_needs_logits_or_has_none_is_refused():
    with pytest.raises(ConfigError, match="must be at least 1"):
        trained(gpt(), ChunkedLoss(tokens=0))
    with pytest.raises(ConfigError, match="finds no linear head in Linear"):
        trained(nn.Linear(3, 3), ChunkedLoss())
    with pytest.raises(ConfigError, match="has a loss of its own"):
        compose(Job(gpt(), loss=lambda output, batch: (output.sum(), 1)), [ChunkedLoss()])
    with pytest.raises(ConflictError, match="needs logits for its loss"):
        compose(Job(gpt()), [ChunkedLoss(), Distill(teacher="shoestring.models.gpt:tiny")])
