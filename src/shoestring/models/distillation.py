"""Distillation: a student learns from the logits of a teacher (Hinton et al., 2015)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.task import IGNORED, Batch, Forward, Output, call_model
from shoestring.models.loading import open_model, outline

Objective = Literal["kl", "reverse_kl", "tv", "hybrid"]

CHUNK, CPU_CHUNK = 2**22, 2**18
"""Number of logits that are processed at once in single precision, on a GPU and on a CPU. On a GPU each temporary
tensor takes 16 MiB. On a CPU it takes 1 MiB, which fits the cache (measured: 41 ms instead of 58 ms for 2048 tokens
with a vocabulary of 2048, forward and backward)."""
ETA = 3.0
"""Rate η in the hybrid loss, where KL has the weight λ = exp(−η · acceptance) and total variation the weight 1 − λ."""


class KnownWords(NamedTuple):
    """A teacher's next-token distributions, reduced to the likeliest tokens of the vocabulary ("words") and a sample of
    the other words.

    All other words are treated as one outcome. Total variation and, without a sample, KL are therefore lower bounds of
    their values over all words. With a sample, KL and its gradient are unbiased estimates (Anshumann et al., 2025).
    Renormalizing over the likeliest words instead would teach the student that no other word ever occurs.
    """

    words: Tensor
    """The likeliest words: integers (..., k)."""
    log_probabilities: Tensor
    """Log-probabilities (..., k + 1) at the temperature of the loss: of `words` and, as the last one, of all other
    words together."""
    drawn: Tensor | None = None
    """Words outside `words`, sampled with replacement in proportion to their probabilities: integers (..., m)."""
    entropy: Tensor | None = None
    """The sum −Σ p log p over the words outside `words`, shape (...); None if `drawn` is None."""


def known_words(
    logits: Tensor, count: int, *, drawn: int = 0, seeds: Sequence[int] = (), temperature: float = 1.0
) -> KnownWords:
    """Reduce logits (B, ..., V) to the `count` likeliest words and a sample of `drawn` others, at least in single
    precision.

    Args:
        seeds: seeds of the samples, one for each of the B rows.
    """
    logits = logits.to(_wide(logits)) / temperature
    values, words = logits.topk(count, sorted=False)
    others = logits.scatter(-1, words, -torch.inf)
    log_probabilities = torch.cat((values, others.logsumexp(-1, keepdim=True)), -1).log_softmax(-1)
    if not drawn or count == logits.shape[-1]:
        return KnownWords(words, log_probabilities)
    mass, shares = log_probabilities[..., -1], others.softmax(-1).nan_to_num(1 / logits.shape[-1])
    samples = []
    for row, seed in zip(shares.reshape(len(shares), -1, shares.shape[-1]), seeds, strict=True):
        generator = torch.Generator(logits.device).manual_seed(seed)
        samples.append(torch.multinomial(row, drawn, replacement=True, generator=generator))
    entropy = mass.exp() * (torch.special.entr(shares).sum(-1) - mass.clamp_min(torch.finfo(mass.dtype).min))
    return KnownWords(words, log_probabilities, torch.stack(samples).view(*words.shape[:-1], drawn), entropy)


class TokenLosses(NamedTuple):
    """Losses and metrics of each token; every field has shape (...) and at least single precision."""

    loss: Tensor
    """T² x the objective; the only field with a gradient."""
    divergence: Tensor
    """KL(teacher ‖ student) in nats."""
    acceptance: Tensor
    """Σ min(teacher, student) over words: the probability that a word drafted by the student is accepted."""


def token_losses(
    student: Tensor, teacher: Tensor | KnownWords, *, objective: Objective = "kl", temperature: float = 1.0
) -> TokenLosses:
    """The divergence of a student from its teacher for each token; both distributions are softmax(logits / T).

    The objectives, for teacher p and student q, are
    - `kl`: KL(p ‖ q);
    - `reverse_kl`: KL(q ‖ p), where words that the teacher excludes get the smallest normal number as probability,
      because the loss would otherwise be infinite;
    - `tv`: the total variation 1 − Σ min(p, q), the probability that a draft is rejected;
    - `hybrid`: λ KL + (1 − λ) TV with λ = exp(−3 Σ min(p, q)), where λ is treated as a constant in the backward pass.
      The loss is mostly KL while the student is far from the teacher, because TV then has almost no gradient, and
      mostly TV once it is close (Samarin et al., 2026).

    The factor T² keeps the scale of gradients independent of T. Softmaxes are in single precision (double for logits in
    double), one chunk of tokens at a time, both here and in the backward pass, so no tensor as large as the logits is
    allocated except their gradient.

    Args:
        student: logits (..., V).
        teacher: logits (..., V) of any floating type, in which -inf excludes a word, or `KnownWords`; the teacher gets
            no gradient.
        temperature: T; values above 1 give the teacher's small probabilities more weight.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.
    """
    known = isinstance(teacher, KnownWords)
    values = teacher.log_probabilities if known else teacher
    if values.shape[:-1] != student.shape[:-1] or (not known and values.shape != student.shape):
        raise ConfigError(
            f"logits of shape {tuple(values.shape)} of a teacher do not fit {tuple(student.shape)} of its student",
            hint="both must have the same vocabulary",
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"the temperature of distillation must be positive, got {temperature}")
    flat = student.flatten(0, -2)
    if isinstance(teacher, KnownWords):
        words, values, drawn = (None if part is None else part.detach().flatten(0, -2) for part in teacher[:3])
        entropy = None if teacher.entropy is None else teacher.entropy.detach().flatten()
        losses = _KnownLosses.apply(flat, words, values, drawn, entropy, objective, temperature)
    else:
        losses = _TokenLosses.apply(flat, values.detach().flatten(0, -2), objective, temperature)
    return TokenLosses(*(values.view(student.shape[:-1]) for values in losses))


def distillation_loss(
    student: Tensor,
    teacher: Tensor | KnownWords,
    *,
    objective: Objective = "kl",
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of weight x `token_losses`; 0-d.

    Args:
        weights: (...), one for each token; defaults to 1. Tokens of weight 0 contribute nothing, even if their loss is
            not finite.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.
    """
    if weights is not None and weights.shape != student.shape[:-1]:
        raise ConfigError(f"weights of shape {tuple(weights.shape)} do not fit logits of {tuple(student.shape)}")
    loss = token_losses(student, teacher, objective=objective, temperature=temperature).loss
    return loss.sum() if weights is None else torch.where(weights > 0, weights * loss, 0).sum()


class _TokenLosses(torch.autograd.Function):
    """student (N, V), teacher (N, V) -> loss, divergence and acceptance, (N,) each; see `token_losses`."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, objective: Objective, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Buffers are reused in place throughout: a chunk is meant to stay in cache.
        divergence, acceptance, reverse = (student.new_empty(len(student), dtype=_wide(student)) for _ in range(3))
        for rows, log_q in _chunks(student, temperature):
            log_p = _log_softmax(teacher[rows].to(log_q.dtype), temperature)
            p = log_p.exp()
            apart, q = _floored(log_p, objective).sub_(log_q), log_q.exp_()
            divergence[rows] = torch.where(p > 0, p * apart, 0).sum(-1)
            acceptance[rows] = torch.minimum(p, q).sum(-1)
            if objective == "reverse_kl":
                reverse[rows] = -torch.where(q > 0, q * apart, 0).sum(-1)
        ctx.save_for_backward(student, teacher, acceptance, reverse)
        return _combined(ctx, divergence, acceptance, reverse, objective, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        student, teacher, acceptance, reverse = ctx.saved_tensors
        of_student = torch.empty_like(student)
        share, scale = _share_of_kl(ctx.objective, acceptance), grad * ctx.temperature
        for rows, log_q in _chunks(student, ctx.temperature):
            log_p = _log_softmax(teacher[rows].to(log_q.dtype), ctx.temperature)
            if ctx.objective == "reverse_kl":
                q, above = log_q.exp(), log_q.sub_(_floored(log_p, "reverse_kl")).sub_(reverse[rows, None])
                of_student[rows] = torch.where((scale[rows, None] != 0) & (q > 0), scale[rows, None] * q * above, 0)
                continue
            q, p = log_q.exp_(), log_p.exp_()
            apart = torch.sub(q, p, out=p)
            direction = (scale * share)[rows, None] * apart
            if ctx.objective != "kl":
                sides = apart.sign_().mul_(q)  # 2 (d TV / d q) · q = sign(q - p) · q
                direction += (scale * (1 - share))[rows, None] / 2 * sides.sub_(q.mul_(sides.sum(-1, keepdim=True)))
            of_student[rows] = torch.where(scale[rows, None] != 0, direction, 0).to(student.dtype)
        return of_student, None, None, None


class _KnownLosses(torch.autograd.Function):
    """Like `_TokenLosses`, for a teacher whose distributions are `KnownWords`.

    student (N, V), words (N, k), log-probabilities (N, k + 1), drawn (N, m), entropy (N,) -> loss, divergence and
    acceptance, (N,) each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        words: Tensor,
        values: Tensor,
        drawn: Tensor | None,
        entropy: Tensor | None,
        objective: Objective,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        divergence, acceptance, reverse = (student.new_empty(len(student), dtype=_wide(student)) for _ in range(3))
        for rows, log_q in _chunks(student, temperature):
            log_p, index = values[rows].to(log_q.dtype).log_softmax(-1), words[rows].to(torch.int64)
            of_others = log_q.scatter(-1, index, -torch.inf).logsumexp(-1, keepdim=True)
            log_merged, p = torch.cat((log_q.gather(-1, index), of_others), -1), log_p.exp()
            merged, apart = log_merged.exp(), _floored(log_p, objective) - log_merged
            reverse[rows] = -torch.where(merged > 0, merged * apart, 0).sum(-1)
            lost = torch.where(p > 0, p * apart, 0)
            if drawn is not None and entropy is not None:
                tail = -entropy[rows].to(p.dtype) - p[:, -1] * log_q.gather(-1, drawn[rows].to(torch.int64)).mean(-1)
                lost[:, -1] = torch.where(p[:, -1] > 0, tail, 0)
            divergence[rows] = lost.sum(-1)
            acceptance[rows] = torch.minimum(p, merged).sum(-1)
        ctx.save_for_backward(student, words, values, drawn, acceptance, reverse)
        return _combined(ctx, divergence, acceptance, reverse, objective, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        student, words, values, drawn, acceptance, reverse = ctx.saved_tensors
        of_student = torch.empty_like(student)
        share, scale = _share_of_kl(ctx.objective, acceptance), grad * ctx.temperature
        for rows, log_q in _chunks(student, ctx.temperature):
            p, index = values[rows].to(log_q.dtype).softmax(-1), words[rows].to(torch.int64)
            merged = torch.cat((log_q.gather(-1, index), log_q.scatter(-1, index, -torch.inf).logsumexp(-1, True)), -1)
            q, merged = log_q.exp_(), merged.exp_()
            of_kl, of_tv = (scale * share)[rows, None], (scale * (1 - share))[rows, None]
            sides = (merged - p).sign_()  # twice d TV / d merged
            middle = (sides * merged).sum(-1, keepdim=True)
            # Gradient with respect to log q: a term for all words in proportion to q, then corrections for known words.
            of_all = of_kl + of_tv / 2 * (sides[:, -1:] - middle)
            of_words = of_tv / 2 * (sides[:, :-1] - sides[:, -1:]) * merged[:, :-1] - of_kl * p[:, :-1]
            if ctx.objective == "reverse_kl":
                above = torch.where(merged > 0, merged.log() - _floored(p.log(), "reverse_kl") - reverse[rows, None], 0)
                of_all = scale[rows, None] * above[:, -1:]
                of_words = scale[rows, None] * (above[:, :-1] - above[:, -1:]) * merged[:, :-1]
            elif drawn is None:
                left = torch.where(merged[:, -1:] > 0, p[:, -1:] / merged[:, -1:], 0)
                of_all, of_words = of_all - of_kl * left, of_words + of_kl * left * merged[:, :-1]
            direction = (of_all * q).scatter_add_(-1, index, of_words)
            if drawn is not None and ctx.objective != "reverse_kl":
                of_draw = -of_kl * p[:, -1:] / drawn.shape[1]
                direction.scatter_add_(-1, drawn[rows].to(torch.int64), of_draw.expand(-1, drawn.shape[1]))
            of_student[rows] = torch.where(scale[rows, None] != 0, direction, 0).to(student.dtype)
        return of_student, None, None, None, None, None, None


def _combined(
    ctx: Any, divergence: Tensor, acceptance: Tensor, reverse: Tensor, objective: Objective, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss from its terms; returns the outputs of `_TokenLosses` and `_KnownLosses`, and stores on `ctx`
    what the backward pass needs."""
    ctx.objective, ctx.temperature = objective, temperature
    ctx.mark_non_differentiable(divergence, acceptance)
    rejection = 1 - acceptance
    if objective == "tv":  # the divergence may be infinite, and 0 times infinity is NaN
        return temperature**2 * rejection, divergence, acceptance
    if objective == "reverse_kl":
        return temperature**2 * reverse, divergence, acceptance
    share = _share_of_kl(objective, acceptance)
    return temperature**2 * (share * divergence + (1 - share) * rejection), divergence, acceptance


def _share_of_kl(objective: Objective, acceptance: Tensor) -> Tensor:
    """The weight λ of KL for each token; see `token_losses`."""
    if objective == "hybrid":
        return (-ETA * acceptance).exp()
    return torch.full_like(acceptance, float(objective == "kl"))


def _floored(log_p: Tensor, objective: Objective) -> Tensor:
    """A teacher's log-probabilities; for the reverse KL, -inf is replaced in place by the log of the smallest normal
    number.
    """
    if objective != "reverse_kl":
        return log_p
    return log_p.masked_fill_(log_p == -torch.inf, math.log(torch.finfo(log_p.dtype).tiny))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(student: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over chunks of rows: the slice, and the student's log-probabilities at the temperature, which the caller
    may overwrite."""
    size = max(1, (CPU_CHUNK if student.device.type == "cpu" else CHUNK) // student.shape[1])
    for start in range(0, len(student), size):
        rows = slice(start, start + size)
        yield rows, _log_softmax(student[rows], temperature)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax of logits / T, always in a new tensor, because callers overwrite it."""
    return F.log_softmax(logits / temperature if temperature != 1 else logits, -1, dtype=_wide(logits))


@torch.no_grad()
def acceptance(
    student: nn.Module, teacher: nn.Module, batches: Iterable[Batch], forward: Forward = call_model
) -> tuple[float, int]:
    """Sum the acceptance probability Σ min(p, q) of teacher p and student q, at temperature 1, over all tokens of
    `batches` that have a target; also returns the number of these tokens.

    The ratio of the two results is the fraction of drafted tokens that is accepted when the student drafts
    continuations of prefixes of these texts.

    Args:
        student, teacher: models in evaluation mode, on the device of the batches.
        forward: (model, batch) -> output of the model.
    """
    total, count = 0.0, 0
    for batch in batches:
        drafted, wanted = (logits_of(forward(model, batch)) for model in (student, teacher))
        accepted = token_losses(drafted, wanted).acceptance[counted(batch)]
        total, count = total + float(accepted.sum()), count + accepted.numel()
    return total, count


def logits_of(output: Output) -> Tensor:
    """The logits of a model's output: the output itself or its `.logits`."""
    return getattr(output, "logits", output)


def targets_of(batch: Batch) -> Tensor:
    """The targets of a batch, (...), by the rules of `core.task.cross_entropy`.

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
            "the batch has no targets, so it is unknown which tokens enter the loss",
            hint="give `targets` or `labels` in a mapping, or a pair of inputs and targets",
        )
    return targets


def counted(batch: Batch) -> Tensor:
    """Mask of the positions of a batch that have a target; bool (...)."""
    return targets_of(batch) != IGNORED


def check_vocabulary(student: nn.Module, source: str, what: str) -> None:
    """Check that a model can be opened, and that its configuration has the vocabulary size of the student.

    The headers of the model's weight files are checked too, but the weights are not read.

    Args:
        source: name of the model, as in `open_model`. what: key of the run file that error messages name.

    Raises:
        ConfigError: the vocabulary sizes differ, or there is no such model. CheckpointError: the folder `source` holds
            no model, or its weights are damaged.
    """
    student_size, teacher_size = (
        getattr(getattr(model, "config", None), "vocab_size", None) for model in (student, outline(source))
    )
    if isinstance(student_size, int) and isinstance(teacher_size, int) and student_size != teacher_size:
        raise ConfigError(
            f"`{what}`: `{source}` has {teacher_size:,} words, and the model that learns from it has {student_size:,}",
            hint="give data.tokenizer the teacher's tokenizer.json, so that both have the same words",
        )
    outline(source, weights=True)


def freeze_teacher(attachments: Attachments, name: str, source: str = "") -> nn.Module:
    """Open and freeze the teacher of a job; called at the seam MODEL.

    Args:
        name: name under which the job stores the teacher.
        source: name of the teacher, as in `open_model`; defaults to a copy of the job's own model in its present state.
            A resumed run makes this copy again, so it must start from the same model.
    """
    teacher = open_model(source) if source else copy.deepcopy(attachments.module)
    return attachments.frozen(name, teacher, source or "the model that the run began with")


def distil(attachments: Attachments, teacher: nn.Module, *, share: float, temperature: float) -> None:
    """Replace the job's loss by (1 - share) x task loss + share x `distillation_loss` of the tokens with targets;
    called at the seam LOSS.

    Evaluation keeps the task's loss. The metrics `task_loss` and `distillation` are the two losses in nats a token, for
    this rank's latest micro-batch.
    """
    inner = attachments.loss

    def loss(output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = inner(output, batch)
        with torch.no_grad():
            wanted = attachments.forward(teacher, batch)
        weights = counted(batch).float()
        divergence = distillation_loss(logits_of(output), logits_of(wanted), temperature=temperature, weights=weights)
        attachments.numbers["task_loss"], attachments.numbers["distillation"] = (
            total.detach() / count,
            divergence.detach() / count,
        )
        return (1 - share) * total + share * divergence, count

    attachments.loss = loss
