"""The loss of distillation against its formula in double precision, chunk by chunk, and in a job."""

import json
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import shoestring as ss
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.core.job import attachments_of
from shoestring.models import distillation, gpt
from shoestring.models.distillation import (
    KnownWords,
    acceptance,
    check_vocabulary,
    counted,
    distil,
    distillation_loss,
    freeze_teacher,
    known_words,
    token_losses,
)
from shoestring.models.saving import save_model
from shoestring.testing import jobs

ROWS, WORDS = 37, 50


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(ROWS, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def oracle(student, teacher, temperature, weights):
    """Word by word as the definition has it, in double precision."""
    p, q = (each / temperature for each in (teacher, student))
    p, q = (each.exp() / each.exp().sum(-1, keepdim=True) for each in (p, q))
    return temperature**2 * (weights * (p * (p / q).log()).sum(-1)).sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("chunk", [1, 7 * WORDS, 2**22], ids=["row by row", "uneven chunks", "one chunk"])
def test_value_and_gradient_are_those_of_the_definition(monkeypatch, temperature, chunk):
    monkeypatch.setattr(distillation, "CPU_CHUNK", chunk)
    weights = torch.rand(ROWS, dtype=torch.float64)
    weights[3] = 0
    one, other = (logits(1).requires_grad_() for _ in range(2))
    loss = distillation_loss(one, logits(2), temperature=temperature, weights=weights)
    expected = oracle(other, logits(2), temperature, weights)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
    assert (one.grad[3] == 0).all()


def probabilities(teacher, student, temperature):
    return ((each / temperature).softmax(-1) for each in (teacher, student))


def rejection(student, teacher, temperature, weights):
    """The total variation as half the sum of differences, which is how it is defined."""
    p, q = probabilities(teacher, student, temperature)
    return temperature**2 * (weights * (p - q).abs().sum(-1) / 2).sum()


def hybrid(student, teacher, temperature, weights):
    p, q = probabilities(teacher, student, temperature)
    share = (-3 * torch.minimum(p, q).sum(-1)).exp().detach()
    return oracle(student, teacher, temperature, weights * share) + rejection(
        student, teacher, temperature, weights * (1 - share)
    )


def reverse(student, teacher, temperature, weights):
    return oracle(teacher, student, temperature, weights)


ORACLES = {"kl": oracle, "reverse_kl": reverse, "tv": rejection, "hybrid": hybrid}


@pytest.mark.parametrize("objective", list(ORACLES))
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("chunk", [7 * WORDS, 2**22], ids=["uneven chunks", "one chunk"])
def test_each_objective_has_the_value_and_the_gradient_of_its_definition(monkeypatch, objective, temperature, chunk):
    monkeypatch.setattr(distillation, "CPU_CHUNK", chunk)
    weights = torch.rand(ROWS, dtype=torch.float64)
    one, other = (logits(1).requires_grad_() for _ in range(2))
    loss = distillation_loss(one, logits(2), objective=objective, temperature=temperature, weights=weights)
    expected = ORACLES[objective](other, logits(2), temperature, weights)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_each_token_has_its_loss_its_divergence_and_its_acceptance():
    student = logits(1).requires_grad_()
    found = token_losses(student, logits(2), objective="tv", temperature=2.0)
    p, q = probabilities(logits(2), logits(1), 2.0)
    torch.testing.assert_close(found.acceptance, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(found.divergence, (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(found.loss, 4 * (1 - found.acceptance))
    assert found.loss.requires_grad and not found.divergence.requires_grad and not found.acceptance.requires_grad


@pytest.mark.parametrize("objective", list(ORACLES))
def test_the_words_that_a_teacher_does_not_tell_count_as_one_outcome(objective):
    """The divergence of the k words and "any other", which is what autograd makes of that definition."""
    one, other = (logits(1).requires_grad_() for _ in range(2))
    top = known_words(logits(2), 6, temperature=2.0)
    loss = distillation_loss(one, top, objective=objective, temperature=2.0)
    p, q = probabilities(logits(2), other, 2.0)
    index = p.topk(6).indices
    merged = [
        torch.cat((each.gather(-1, index), 1 - each.gather(-1, index).sum(-1, keepdim=True)), -1) for each in (q, p)
    ]
    expected = ORACLES[objective](merged[0].log() * 2, merged[1].log() * 2, 2.0, torch.ones(ROWS, dtype=torch.float64))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert float(loss.detach()) < float(distillation_loss(logits(1), logits(2), objective=objective, temperature=2.0))


def test_all_words_of_a_teacher_are_its_logits_and_narrow_numbers_lose_little():
    whole = distillation_loss(logits(1), logits(2))
    torch.testing.assert_close(distillation_loss(logits(1), known_words(logits(2), WORDS)), whole)
    top = known_words(logits(2).float(), 20)
    narrow = KnownWords(top.words.to(torch.uint16), top.log_probabilities.half())
    student = logits(1).float()
    torch.testing.assert_close(distillation_loss(student, narrow), distillation_loss(student, top), rtol=1e-3, atol=0)
    with pytest.raises(ConfigError, match="do not fit"):
        distillation_loss(logits(1)[:3], top)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["kl", "tv"])
def test_a_teachers_optimum_is_the_teacher(objective):
    """Dividing by the mass of the likeliest words has another one: no mass on any other word."""
    torch.manual_seed(0)
    teacher = torch.randn(1, 8, dtype=torch.float64)
    top = known_words(teacher, 3)
    divided = KnownWords(top.words, top.log_probabilities.clone())
    divided.log_probabilities[:, -1] = -torch.inf
    mass = {}
    for name, known in {"one outcome": top, "divided": divided}.items():
        student = torch.zeros(1, 8, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([student], lr=0.5)
        for _ in range(400):
            optimizer.zero_grad()
            distillation_loss(student, known, objective=objective).backward()
            optimizer.step()
        mass[name] = float(student.detach().softmax(-1).gather(-1, top.words).sum())
    told = float(top.log_probabilities[:, :-1].exp().sum())
    assert mass["one outcome"] == pytest.approx(told, abs=0.02) and mass["divided"] > told + 0.1


def drawn_words(drawn=5, seed=0):
    return known_words(logits(2)[:, None], 4, drawn=drawn, seeds=range(seed, seed + ROWS), temperature=2.0)


@pytest.mark.parametrize("objective", ["kl", "tv", "hybrid"])
def test_a_sample_stands_for_the_other_words_in_kl(objective):
    """-Σ p log q of the sample, and what does not depend on the student; total variation stays that of one outcome."""
    one, other = (logits(1)[:, None].requires_grad_() for _ in range(2))
    known, merged = drawn_words(), drawn_words(0)
    loss = distillation_loss(one, known, objective=objective, temperature=2.0)
    log_q, p = (other / 2).log_softmax(-1), known.log_probabilities.exp()
    cross = (p[..., :-1] * log_q.gather(-1, known.words)).sum(-1) + p[..., -1] * log_q.gather(-1, known.drawn).mean(-1)
    divergence = (p[..., :-1] * known.log_probabilities[..., :-1]).sum(-1) - known.entropy - cross
    rejected = token_losses(other, merged, objective="tv", temperature=2.0).loss / 4
    share = {"kl": 1.0, "tv": 0.0, "hybrid": (-3 * (1 - rejected)).exp().detach()}[objective]
    expected = 4 * (share * divergence + (1 - share) * rejected).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_samples_change_neither_the_mean_of_kl_nor_that_of_its_gradient():
    student = logits(1)[:, None].requires_grad_()
    whole = distillation_loss(student, logits(2)[:, None], temperature=2.0)
    whole.backward()
    exact, student.grad = student.grad, None
    sampled = torch.stack(
        [distillation_loss(student, drawn_words(200, seed=1000 * number), temperature=2.0) for number in range(30)]
    ).mean()
    sampled.backward()
    assert float(sampled.detach()) == pytest.approx(float(whole.detach()), rel=0.01)
    assert float((student.grad - exact).norm() / exact.norm()) < 0.02
    student.grad = None
    distillation_loss(student, drawn_words(0), temperature=2.0).backward()
    assert float((student.grad - exact).norm() / exact.norm()) > 0.2  # what one outcome makes of it


def test_a_sample_depends_on_its_seed_alone_and_holds_no_likeliest_word():
    both = known_words(logits(2)[:6].view(2, 3, WORDS), 4, drawn=9, seeds=[7, 8])
    alone = known_words(logits(2)[3:6].view(1, 3, WORDS), 4, drawn=9, seeds=[8])
    assert torch.equal(both.drawn[1], alone.drawn[0]) and both.drawn.shape == (2, 3, 9)
    assert not (both.drawn[..., None] == both.words[..., None, :]).any()
    certain = logits(2)[:3].view(1, 3, WORDS).clone()
    certain[..., 4:] = -torch.inf  # nothing is left to draw from
    nothing = known_words(certain, 4, drawn=9, seeds=[7])
    found = token_losses(logits(1)[:3].view(1, 3, WORDS), nothing)
    torch.testing.assert_close(found.divergence, token_losses(logits(1)[:3].view(1, 3, WORDS), certain).divergence)
    assert known_words(certain, WORDS, drawn=9, seeds=[7]).drawn is None


def test_acceptance_is_over_the_tokens_that_count():
    student, teacher = jobs.tiny(), jobs.tiny()
    torch.nn.init.normal_(teacher.embedding.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    batch = jobs.batch(0, ragged=True)
    total, count = acceptance(student, teacher, [batch, batch])
    p, q = (model(batch["inputs"]).detach().softmax(-1) for model in (teacher, student))
    kept = batch["targets"] != -100
    assert count == 2 * int(kept.sum()) and total == pytest.approx(2 * float(torch.minimum(p, q).sum(-1)[kept].sum()))


def test_another_vocabulary_is_refused_before_any_weights_are_read(tmp_path):
    save_model(gpt.tiny(64, 8, dim=8, layers=1, heads=1, kv_heads=1, hidden=8), None, tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    student = gpt.tiny(48, 8, dim=8, layers=1, heads=1, kv_heads=1, hidden=8)
    with pytest.raises(ConfigError, match=r"`x.teacher`: `.*` has 64 words, and the model that learns from it has 48"):
        check_vocabulary(student, str(tmp_path), "x.teacher")
    of = json.loads((tmp_path / "config.json").read_text())
    for form in ("packed", "quantized"):  # whatever its layers became
        marked = of | {"shoestring": {"format": form, "of": {"format": "gpt"}, "layers": {}}}
        (tmp_path / "config.json").write_text(json.dumps(marked))
        with pytest.raises(ConfigError, match=r"has 64 words, and the model that learns from it has 48"):
            check_vocabulary(student, str(tmp_path), "x.teacher")
    (tmp_path / "config.json").write_text(json.dumps(of))
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_vocabulary(gpt.tiny(64, 8, dim=8, layers=1, heads=1, kv_heads=1, hidden=8), str(tmp_path), "x.teacher")
    with pytest.raises(CheckpointError, match="holds no model"):
        check_vocabulary(student, str(tmp_path / "absent"), "x.teacher")


@pytest.mark.parametrize("objective", ["kl", "reverse_kl", "tv"])
def test_autograd_agrees_with_finite_differences(objective):
    student = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 3, 5, dtype=torch.float64)
    for known in (teacher, known_words(teacher, 2, temperature=2.0)):
        loss = partial(distillation_loss, teacher=known, objective=objective, temperature=2.0)
        assert torch.autograd.gradcheck(loss, student)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_summed_in_single(dtype):
    student, teacher = (logits(seed).to(dtype).requires_grad_() for seed in (1, 2))
    loss = distillation_loss(student, teacher, temperature=2.0)
    loss.backward()
    assert loss.dtype is torch.float32 and student.grad.dtype is dtype and teacher.grad is None
    exact = oracle(student.detach().double(), teacher.detach().double(), 2.0, torch.ones(ROWS))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)


def test_equal_logits_lose_nothing_and_words_that_a_teacher_excludes_are_no_fault():
    assert float(distillation_loss(logits(1), logits(1) + 7)) == pytest.approx(0, abs=1e-12)
    teacher = logits(2)
    teacher[:, :10] = -torch.inf
    student = logits(1).requires_grad_()
    loss = distillation_loss(student, teacher)
    loss.backward()
    rest = (student.detach().log_softmax(-1)[:, 10:], teacher[:, 10:].log_softmax(-1))
    torch.testing.assert_close(loss.detach(), F.kl_div(*rest, log_target=True, reduction="sum"))
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("objective", ["kl", "reverse_kl", "tv", "hybrid"])
@pytest.mark.parametrize("excluded", [[1, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("students_too", [False, True])
def test_words_that_a_teacher_excludes_leave_no_loss_or_gradient_that_is_not_finite(objective, excluded, students_too):
    teacher, student = logits(2)[:, :6].clone(), logits(1)[:, :6].clone()
    teacher[:, excluded] = -torch.inf
    if students_too:
        student[:, excluded] = -torch.inf
    known = [known_words(teacher[None], count) for count in (1, 3, 6)]
    known += [known_words(teacher[None], count, drawn=2, seeds=[0]) for count in (1, 3)]
    for given in (teacher[None], *known):
        asked = student[None].clone().requires_grad_()
        losses = token_losses(asked, given, objective=objective)
        losses.loss.sum().backward()
        assert all(each.isfinite().all() for each in (*losses, asked.grad))
    towards = asked.detach() - 1e-3 * asked.grad  # a step away from what is excluded
    q, after = (each.softmax(-1)[..., excluded].sum() for each in (asked.detach(), towards))
    assert after <= q * (1 + 1e-6)


def test_tokens_of_weight_0_are_not_read():
    student, weights = logits(1), torch.ones(ROWS)
    student[5], weights[5] = torch.nan, 0
    student.requires_grad_()
    loss = distillation_loss(student, logits(2), weights=weights)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4), 1.0, None), "do not fit"),
        ((torch.ones(2, 3), torch.ones(2, 3), 0.0, None), "must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, torch.ones(3)), "weights of shape"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    student, teacher, temperature, weights = arguments
    with pytest.raises(ConfigError, match=message):
        distillation_loss(student, teacher, temperature=temperature, weights=weights)


def test_the_tokens_that_count_are_those_of_the_cross_entropy():
    targets = torch.tensor([[1, -100, 2]])
    assert counted({"targets": targets}).tolist() == [[True, False, True]]
    assert counted((None, targets)).tolist() == [[True, False, True]]
    assert counted({"input_ids": targets, "labels": targets}).tolist() == [[False, True, False]]
    with pytest.raises(ConfigError, match="the batch has no targets"):
        counted({"inputs": targets})


class Distil(Feature):
    """Distils from a copy of the model that the job began with."""

    seams = (Seam.MODEL, Seam.LOSS)

    def apply(self, attachments, seam):
        if seam is Seam.MODEL:
            freeze_teacher(attachments, "teacher")
        else:
            distil(attachments, attachments.frozen_modules["teacher"], share=0.25, temperature=2.0)


def test_the_loss_of_a_job_is_shared_between_its_own_and_the_teachers():
    batch = jobs.batch(0, ragged=True)
    with ss.compose(ss.Job(jobs.tiny(), optimizer=jobs.sgd()), [Distil()]) as job:
        first = float(job.step(batch))
        own = F.cross_entropy(jobs.tiny()(batch["inputs"]).detach().flatten(0, 1), batch["targets"].flatten())
        assert first == pytest.approx(0.75 * float(own), rel=1e-6)  # the student still is the teacher
        student = [weight.clone() for weight in attachments_of(job).module.state_dict().values()]
        second = float(job.step(batch))
        moved = jobs.tiny()
        moved.load_state_dict(dict(zip(moved.state_dict(), student, strict=True)))
        after, before = (model(batch["inputs"]).detach().double().flatten(0, 1) for model in (moved, jobs.tiny()))
        kept = batch["targets"].flatten() != -100
        own = F.cross_entropy(after, batch["targets"].flatten())
        divergence = oracle(after[kept], before[kept], 2.0, torch.ones(int(kept.sum()))) / kept.sum()
        assert float(job.numbers["distillation"]) == pytest.approx(float(divergence), rel=1e-4)
        assert float(job.numbers["task_loss"]) == pytest.approx(float(own), rel=1e-5)
        assert second == pytest.approx(float(0.75 * own + 0.25 * divergence), rel=1e-5)
