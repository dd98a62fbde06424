"""Distillation: a student learns from the logits of a teacher (Hinton et al., 2015), beside its own loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import IGNORED, Batch, Output
from shoestring.models.loading import open_model

CHUNK = 2**22
"""Logits that are in memory in single precision at a time: 16 MiB for each of a few tensors."""


def distillation_loss(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, weights: Tensor | None = None
) -> Tensor:
    """Sum over tokens of weight x T² x KL(softmax(teacher / T) ‖ softmax(student / T)), in nats; 0-d.

    The factor T² keeps gradients of the size that they have at T = 1. Softmaxes are in single precision (in double for
    logits in double), a chunk of tokens at a time, both here and in the backward pass; nothing of the size of the
    logits is allocated besides their gradient.

    Args:
        student: logits (..., V).
        teacher: logits (..., V), of any floating type; they get no gradient. -inf excludes a word.
        temperature: above 1, the teacher's small probabilities count for more.
        weights: (...), one for each token; defaults to 1. Tokens of weight 0 are not read.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.
    """
    if student.shape != teacher.shape:
        raise ConfigError(
            f"logits of shape {tuple(teacher.shape)} of a teacher do not fit {tuple(student.shape)} of its student",
            hint="both must have the same vocabulary",
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"the temperature of distillation must be positive, got {temperature}")
    if weights is None:
        weights = torch.ones(student.shape[:-1], device=student.device)
    if weights.shape != student.shape[:-1]:
        raise ConfigError(f"weights of shape {tuple(weights.shape)} do not fit logits of {tuple(student.shape)}")
    return _Divergence.apply(student.flatten(0, -2), teacher.detach().flatten(0, -2), weights.flatten(), temperature)


class _Divergence(torch.autograd.Function):
    """student (N, V), teacher (N, V), weights (N,) -> 0-d; see `distillation_loss`."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(student, teacher, weights)
        ctx.temperature = temperature
        total = torch.zeros((), dtype=_wide(student), device=student.device)
        for _, log_q, log_p, weight in _chunks(student, teacher, weights, temperature):
            p = log_p.exp()
            divergence = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)
            total += torch.where(weight > 0, weight * divergence, 0).sum()
        return total * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, weights = ctx.saved_tensors
        of_student = torch.empty_like(student)
        for rows, log_q, log_p, weight in _chunks(student, teacher, weights, ctx.temperature):
            apart = log_q.exp_().sub_(log_p.exp_())
            scale = (grad * ctx.temperature * weight)[:, None]
            of_student[rows] = torch.where(scale != 0, apart * scale, 0).to(student.dtype)
        return of_student, None, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(
    student: Tensor, teacher: Tensor, weights: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, log-probabilities of student and teacher at the temperature, and weights."""
    wide, size = _wide(student), max(1, CHUNK // student.shape[1])
    for start in range(0, len(student), size):
        rows = slice(start, start + size)
        log_q, log_p = (F.log_softmax(each[rows].to(wide) / temperature, -1) for each in (student, teacher))
        yield rows, log_q, log_p, weights[rows].to(wide)


def counted(batch: Batch) -> Tensor:
    """Which positions of a batch have a target that counts; bool (...), read as `core.task.cross_entropy` does.

    Raises:
        ConfigError: the batch has no targets.
    """
    if isinstance(batch, Mapping):
        targets = batch.get("targets")
        if targets is None and isinstance(labels := batch.get("labels"), Tensor):
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if labels.ndim > 1 else labels
    else:
        targets = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    if not isinstance(targets, Tensor):
        raise ConfigError(
            "distillation finds no targets in the batch, which say which tokens count",
            hint="give `targets` or `labels` in a mapping, or a pair of inputs and targets",
        )
    return targets != IGNORED


def freeze_teacher(job: Job, name: str, source: str = "") -> nn.Module:
    """The teacher of a job, frozen; at the seam MODEL.

    Args:
        name: what it is kept under.
        source: the teacher, as `open_model` takes it; by default a copy of the job's own model as it is now. That copy
            is made again when a run resumes, so a run that resumes must begin with the same model.
    """
    teacher = open_model(source) if source else copy.deepcopy(job.module)
    return job.frozen(name, teacher, source or "the model that the run began with")


def distil(job: Job, teacher: nn.Module, *, share: float, temperature: float) -> None:
    """Wrap the job's loss, at the seam LOSS: (1 - share) x its own + share x `distillation_loss` of counted tokens.

    Evaluation keeps the task's own loss. The numbers `task_loss` and `distillation` are both parts in nats a token, of
    this rank's newest micro-batch.
    """
    inner = job.loss

    def loss(output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = inner(output, batch)
        with torch.no_grad():
            wanted = job.forward(teacher, batch)
        divergence = distillation_loss(
            getattr(output, "logits", output),
            getattr(wanted, "logits", wanted),
            temperature=temperature,
            weights=counted(batch).float(),
        )
        job.numbers["task_loss"], job.numbers["distillation"] = total.detach() / count, divergence.detach() / count
        return (1 - share) * total + share * divergence, count

    job.loss = loss
