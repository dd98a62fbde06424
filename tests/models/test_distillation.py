"""The loss of distillation against its formula in double precision, chunk by chunk, and in a job."""

import pytest
import torch
from torch.nn import functional as F

import shoestring as ss
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.models import distillation
from shoestring.models.distillation import counted, distil, distillation_loss, freeze_teacher
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


def test_autograd_agrees_with_finite_differences():
    student = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: distillation_loss(s, teacher, temperature=2.0), student)


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
    with pytest.raises(ConfigError, match="no targets in the batch"):
        counted({"inputs": targets})


class Distil(Feature):
    """Distils from a copy of the model that the job began with."""

    seams = (Seam.MODEL, Seam.LOSS)

    def apply(self, job, seam):
        if seam is Seam.MODEL:
            freeze_teacher(job, "teacher")
        else:
            distil(job, job.frozen_modules["teacher"], share=0.25, temperature=2.0)


def test_the_loss_of_a_job_is_shared_between_its_own_and_the_teachers():
    batch = jobs.batch(0, ragged=True)
    with ss.compose(ss.Job(jobs.tiny(), optimizer=jobs.sgd()), [Distil()]) as job:
        first = float(job.step(batch))
        own = F.cross_entropy(jobs.tiny()(batch["inputs"]).detach().flatten(0, 1), batch["targets"].flatten())
        assert first == pytest.approx(0.75 * float(own), rel=1e-6)  # the student still is the teacher
        student = [weight.clone() for weight in job.module.state_dict().values()]
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
