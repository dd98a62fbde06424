"""Distillation: a student learns from the logits of a teacher (Hinton et al., 2015)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import IGNORED, Batch, Forward, Output, call_model
from shoestring.models.loading import open_model, outline

Objective = Literal["kl", "tv", "hybrid"]

CHUNK, CPU_CHUNK = 2**22, 2**18
"""Logits that are in memory in single precision at a time: 16 MiB for each of a few tensors, and 1 MiB on a CPU, whose
cache holds that (measured: 41 ms in place of 58 for 2048 tokens of 2048 words, forward and backward)."""
ETA = 3.0
"""How fast the hybrid loss turns from KL to total variation as the acceptance grows."""


class TopWords(NamedTuple):
    """A teacher's distributions, of which only the likeliest words are known.

    The words that are not known are taken to share their probability as they do in the student's distribution. So
    every divergence is that of the k words and one outcome "any other word", which is never above the full one, and
    whose optimum has the right probability for each of the k words. Dividing by the mass of the k words instead would
    teach the student that no other word ever comes.
    """

    words: Tensor
    """Integers (..., k)."""
    log_probabilities: Tensor
    """Floating point (..., k + 1): of these words, and last of all others together; at the loss's temperature."""


def top_words(logits: Tensor, count: int, *, temperature: float = 1.0) -> TopWords:
    """The `count` likeliest words of logits (..., V), in single precision at least."""
    logits = logits.to(_wide(logits)) / temperature
    values, words = logits.topk(count, sorted=False)
    others = logits.scatter(-1, words, -torch.inf).logsumexp(-1, keepdim=True)
    return TopWords(words, torch.cat((values, others), -1).log_softmax(-1))


class TokenLosses(NamedTuple):
    """What each token lost; all (...), in single precision at least."""

    loss: Tensor
    """T² x the objective; the only one with a gradient."""
    divergence: Tensor
    """KL(teacher ‖ student) in nats."""
    acceptance: Tensor
    """Σ min(teacher, student) over words: the probability that a draft of the student's is accepted."""


def token_losses(
    student: Tensor, teacher: Tensor | TopWords, *, objective: Objective = "kl", temperature: float = 1.0
) -> TokenLosses:
    """The divergence of a student from its teacher, token by token, between softmax(logits / T) of both.

    The objectives are KL(p ‖ q) of teacher p and student q; the total variation 1 − Σ min(p, q), which is the
    probability that a draft is rejected; and their hybrid λ KL + (1 − λ) TV with λ = exp(−3 Σ min(p, q)), which has no
    gradient of its own: KL where the student is far off and TV gives no direction, TV where it is close (Samarin et
    al., 2026). The factor T² keeps gradients of the size that they have at T = 1. Softmaxes are in single precision (in
    double for logits in double), a chunk of tokens at a time, both here and in the backward pass; nothing of the size
    of the logits is allocated besides their gradient.

    Args:
        student: logits (..., V).
        teacher: logits (..., V) of any floating type, in which -inf excludes a word, or the likeliest words. They get
            no gradient.
        temperature: above 1, the teacher's small probabilities count for more.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.
    """
    top = isinstance(teacher, TopWords)
    values, words = (teacher.log_probabilities, teacher.words.flatten(0, -2)) if top else (teacher, None)
    fits = values.shape[:-1] == student.shape[:-1] if top else values.shape == student.shape
    if not fits:
        raise ConfigError(
            f"logits of shape {tuple(values.shape)} of a teacher do not fit {tuple(student.shape)} of its student",
            hint="both must have the same vocabulary",
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"the temperature of distillation must be positive, got {temperature}")
    flat = student.flatten(0, -2), values.detach().flatten(0, -2)
    losses = _TokenLosses.apply(*flat, words, objective, temperature)
    return TokenLosses(*(each.view(student.shape[:-1]) for each in losses))


def distillation_loss(
    student: Tensor,
    teacher: Tensor | TopWords,
    *,
    objective: Objective = "kl",
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of weight x `token_losses`; 0-d.

    Args:
        weights: (...), one for each token; defaults to 1. Tokens of weight 0 are not read.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.
    """
    if weights is not None and weights.shape != student.shape[:-1]:
        raise ConfigError(f"weights of shape {tuple(weights.shape)} do not fit logits of {tuple(student.shape)}")
    loss = token_losses(student, teacher, objective=objective, temperature=temperature).loss
    return loss.sum() if weights is None else torch.where(weights > 0, weights * loss, 0).sum()


class _TokenLosses(torch.autograd.Function):
    """student (N, V), teacher (N, V) or (N, k + 1) with words (N, k) -> three times (N,); see `token_losses`."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, words: Tensor | None, objective: Objective, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        divergence, acceptance = (student.new_empty(len(student), dtype=_wide(student)) for _ in range(2))
        for rows, log_q, log_p in _chunks(student, teacher, words, temperature):
            p = log_p.exp()
            divergence[rows] = torch.where(p > 0, p * log_p.sub_(log_q), 0).sum(-1)
            acceptance[rows] = torch.minimum(p, log_q.exp_()).sum(-1)
        share = _share_of_kl(objective, acceptance)
        ctx.save_for_backward(student, teacher, words, share)
        ctx.objective, ctx.temperature = objective, temperature
        ctx.mark_non_differentiable(divergence, acceptance)
        loss = temperature**2 * (share * divergence + (1 - share) * (1 - acceptance))
        if objective == "tv":  # no product of 0 and what may be infinite
            loss = temperature**2 * (1 - acceptance)
        return loss, divergence, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, words, share = ctx.saved_tensors
        of_student = torch.empty_like(student)
        scale = grad * ctx.temperature
        for rows, log_q, log_p in _chunks(student, teacher, words, ctx.temperature):
            q, apart = log_q.exp_(), log_p.exp_()
            apart = torch.sub(q, apart, out=apart)
            of_kl, of_tv = ((scale * each)[rows, None] for each in (share, 1 - share))
            direction = of_kl * apart
            if ctx.objective != "kl":
                sides = apart.sign_().mul_(q)  # d TV / d q is half the sign of q - p, here times q
                direction += of_tv / 2 * sides.sub_(q.mul_(sides.sum(-1, keepdim=True)))
            of_student[rows] = torch.where(scale[rows, None] != 0, direction, 0).to(student.dtype)
        return of_student, None, None, None, None


def _share_of_kl(objective: Objective, acceptance: Tensor) -> Tensor:
    """λ of `token_losses`, token by token."""
    if objective == "hybrid":
        return (-ETA * acceptance).exp()
    return torch.full_like(acceptance, float(objective == "kl"))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(
    student: Tensor, teacher: Tensor, words: Tensor | None, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, and log-probabilities of student and teacher at the temperature, which may be overwritten."""
    size = max(1, (CPU_CHUNK if student.device.type == "cpu" else CHUNK) // student.shape[1])
    for start in range(0, len(student), size):
        rows = slice(start, start + size)
        log_q, known = _log_softmax(student[rows], temperature), teacher[rows]
        if words is None:
            yield rows, log_q, _log_softmax(known.to(log_q.dtype), temperature)
            continue
        known, index = known.to(log_q.dtype).log_softmax(-1), words[rows].to(torch.int64)
        log_p = log_q.scatter(-1, index, -torch.inf)
        log_p += known[:, -1:] - log_p.logsumexp(-1, keepdim=True)
        yield rows, log_q, log_p.scatter_(-1, index, known[:, :-1])


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """A new tensor, also where nothing is to be done."""
    return F.log_softmax(logits / temperature if temperature != 1 else logits, -1, dtype=_wide(logits))


@torch.no_grad()
def acceptance(
    student: nn.Module, teacher: nn.Module, batches: Iterable[Batch], forward: Forward = call_model
) -> tuple[float, int]:
    """(sum of Σ min(p, q) over the tokens of `batches` that count, their number) at temperature 1.

    Their ratio is the share of drafted tokens that is accepted, where drafts follow text as it is in the batches.

    Args:
        student, teacher: in evaluation mode, on the device of the batches.
    """
    total, count = 0.0, 0
    for batch in batches:
        drafted, wanted = (logits_of(forward(model, batch)) for model in (student, teacher))
        accepted = token_losses(drafted, wanted).acceptance[counted(batch)]
        total, count = total + float(accepted.sum()), count + accepted.numel()
    return total, count


def logits_of(output: Output) -> Tensor:
    """The logits that a model returned, as they are or as `.logits`."""
    return getattr(output, "logits", output)


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


def check_vocabulary(student: nn.Module, source: str, what: str) -> None:
    """Make sure that a model has the vocabulary of the student, as far as their configurations tell; reads no weights.

    Args:
        source: the model, as `open_model` takes it. what: its name in the message.

    Raises:
        ConfigError: it has another one, or there is no such model. CheckpointError: its folder holds none.
    """
    mine, theirs = (getattr(getattr(each, "config", None), "vocab_size", None) for each in (student, outline(source)))
    if isinstance(mine, int) and isinstance(theirs, int) and mine != theirs:
        raise ConfigError(
            f"`{what}`: `{source}` has {theirs:,} words, and the model that learns from it has {mine:,}",
            hint="give data.tokenizer the teacher's tokenizer.json, so that both have the same words",
        )


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
        weights = counted(batch).float()
        divergence = distillation_loss(logits_of(output), logits_of(wanted), temperature=temperature, weights=weights)
        job.numbers["task_loss"], job.numbers["distillation"] = total.detach() / count, divergence.detach() / count
        return (1 - share) * total + share * divergence, count

    job.loss = loss
