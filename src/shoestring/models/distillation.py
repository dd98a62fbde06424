"""Distillation: a student learns from the logits of a teacher (Hinton et al., 2015)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import IGNORED, Batch, Forward, Output, call_model
from shoestring.models.loading import open_model, outline

Objective = Literal["kl", "reverse_kl", "tv", "hybrid"]

CHUNK, CPU_CHUNK = 2**22, 2**18
"""Logits that are in memory in single precision at a time: 16 MiB for each of a few tensors, and 1 MiB on a CPU, whose
cache holds that (measured: 41 ms in place of 58 for 2048 tokens of 2048 words, forward and backward)."""
ETA = 3.0
"""How fast the hybrid loss turns from KL to total variation as the acceptance grows."""


class KnownWords(NamedTuple):
    """A teacher's distributions, of which only the likeliest words are known, and a sample of the others.

    Total variation takes all other words as one outcome: it is never above that of all words. So does KL without a
    sample. With one, KL stands on the sample, which changes neither its mean nor its gradient's (Anshumann et al.,
    2025). Dividing by the mass of the likeliest words instead would teach the student that no other word ever comes.
    """

    words: Tensor
    """The likeliest ones: integers (..., k)."""
    log_probabilities: Tensor
    """Floating point (..., k + 1): of these words, and last of all others together; at the loss's temperature."""
    drawn: Tensor | None = None
    """Others, drawn with replacement by their probabilities: integers (..., m)."""
    entropy: Tensor | None = None
    """-Σ p log p over the others (...); with `drawn`."""


def known_words(
    logits: Tensor, count: int, *, drawn: int = 0, seeds: Sequence[int] = (), temperature: float = 1.0
) -> KnownWords:
    """The `count` likeliest words of logits (B, ..., V) and a sample of `drawn` others, in single precision at least.

    Args:
        seeds: of the samples, one for each of the B.
    """
    logits = logits.to(_wide(logits)) / temperature
    values, words = logits.topk(count, sorted=False)
    others = logits.scatter(-1, words, -torch.inf)
    log_probabilities = torch.cat((values, others.logsumexp(-1, keepdim=True)), -1).log_softmax(-1)
    if not drawn or count == logits.shape[-1]:
        return KnownWords(words, log_probabilities)
    mass, shares = log_probabilities[..., -1], others.softmax(-1).nan_to_num(1 / logits.shape[-1])
    samples = []
    for each, seed in zip(shares.reshape(len(shares), -1, shares.shape[-1]), seeds, strict=True):
        generator = torch.Generator(logits.device).manual_seed(seed)
        samples.append(torch.multinomial(each, drawn, replacement=True, generator=generator))
    entropy = mass.exp() * (torch.special.entr(shares).sum(-1) - mass.clamp_min(torch.finfo(mass.dtype).min))
    return KnownWords(words, log_probabilities, torch.stack(samples).view(*words.shape[:-1], drawn), entropy)


class TokenLosses(NamedTuple):
    """What each token lost; all (...), in single precision at least."""

    loss: Tensor
    """T² x the objective; the only one with a gradient."""
    divergence: Tensor
    """KL(teacher ‖ student) in nats."""
    acceptance: Tensor
    """Σ min(teacher, student) over words: the probability that a draft of the student's is accepted."""


def token_losses(
    student: Tensor, teacher: Tensor | KnownWords, *, objective: Objective = "kl", temperature: float = 1.0
) -> TokenLosses:
    """The divergence of a student from its teacher, token by token, between softmax(logits / T) of both.

    The objectives are KL(p ‖ q) of teacher p and student q; the reverse, KL(q ‖ p), which is infinite where the teacher
    excludes a word of the student's; the total variation 1 − Σ min(p, q), which is the probability that a draft is
    rejected; and their hybrid λ KL + (1 − λ) TV with λ = exp(−3 Σ min(p, q)), which has no
    gradient of its own: KL where the student is far off and TV gives no direction, TV where it is close (Samarin et
    al., 2026). The factor T² keeps gradients of the size that they have at T = 1. Softmaxes are in single precision (in
    double for logits in double), a chunk of tokens at a time, both here and in the backward pass; nothing of the size
    of the logits is allocated besides their gradient.

    Args:
        student: logits (..., V).
        teacher: logits (..., V) of any floating type, in which -inf excludes a word, or what is known of them. They get
            no gradient.
        temperature: above 1, the teacher's small probabilities count for more.

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
        words, values, drawn = (None if each is None else each.detach().flatten(0, -2) for each in teacher[:3])
        entropy = None if teacher.entropy is None else teacher.entropy.detach().flatten()
        losses = _KnownLosses.apply(flat, words, values, drawn, entropy, objective, temperature)
    else:
        losses = _TokenLosses.apply(flat, values.detach().flatten(0, -2), objective, temperature)
    return TokenLosses(*(each.view(student.shape[:-1]) for each in losses))


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
        weights: (...), one for each token; defaults to 1. Tokens of weight 0 are not read.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.
    """
    if weights is not None and weights.shape != student.shape[:-1]:
        raise ConfigError(f"weights of shape {tuple(weights.shape)} do not fit logits of {tuple(student.shape)}")
    loss = token_losses(student, teacher, objective=objective, temperature=temperature).loss
    return loss.sum() if weights is None else torch.where(weights > 0, weights * loss, 0).sum()


class _TokenLosses(torch.autograd.Function):
    """student (N, V), teacher (N, V) -> three times (N,); see `token_losses`."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, objective: Objective, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        divergence, acceptance, reverse = (student.new_empty(len(student), dtype=_wide(student)) for _ in range(3))
        for rows, log_q in _chunks(student, temperature):
            log_p = _log_softmax(teacher[rows].to(log_q.dtype), temperature)
            p, apart, q = log_p.exp(), log_p.sub_(log_q), log_q.exp_()
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
                q, above = log_q.exp(), log_q.sub_(log_p).sub_(reverse[rows, None])
                of_student[rows] = torch.where((scale[rows, None] != 0) & (q > 0), scale[rows, None] * q * above, 0)
                continue
            q, p = log_q.exp_(), log_p.exp_()
            apart = torch.sub(q, p, out=p)
            direction = (scale * share)[rows, None] * apart
            if ctx.objective != "kl":
                sides = apart.sign_().mul_(q)  # d TV / d q is half the sign of q - p, here times q
                direction += (scale * (1 - share))[rows, None] / 2 * sides.sub_(q.mul_(sides.sum(-1, keepdim=True)))
            of_student[rows] = torch.where(scale[rows, None] != 0, direction, 0).to(student.dtype)
        return of_student, None, None, None


class _KnownLosses(torch.autograd.Function):
    """student (N, V), words (N, k), log-probabilities (N, k + 1), drawn (N, m), entropy (N,) -> three times (N,)."""

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
            merged, apart = log_merged.exp(), log_p - log_merged
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
            sides = (merged - p).sign_()  # d TV / d merged is half of it
            middle = (sides * merged).sum(-1, keepdim=True)
            # Of all words alike, then what differs at those that are known.
            of_all = of_kl + of_tv / 2 * (sides[:, -1:] - middle)
            of_words = of_tv / 2 * (sides[:, :-1] - sides[:, -1:]) * merged[:, :-1] - of_kl * p[:, :-1]
            if ctx.objective == "reverse_kl":
                above = torch.where(merged > 0, merged.log() - p.log() - reverse[rows, None], 0)
                of_all = scale[rows, None] * above[:, -1:]
                of_words = scale[rows, None] * (above[:, :-1] - above[:, -1:]) * merged[:, :-1]
            elif drawn is None:
                left = torch.where(merged[:, -1:] > 0, p[:, -1:] / merged[:, -1:], 0)
                of_all, of_words = of_all - of_kl * left, of_words + of_kl * left * merged[:, :-1]
            direction = (of_all * q).scatter_add_(-1, index, of_words)
            if drawn is not None and ctx.objective != "reverse_kl":
                each = -of_kl * p[:, -1:] / drawn.shape[1]
                direction.scatter_add_(-1, drawn[rows].to(torch.int64), each.expand(-1, drawn.shape[1]))
            of_student[rows] = torch.where(scale[rows, None] != 0, direction, 0).to(student.dtype)
        return of_student, None, None, None, None, None, None


def _combined(
    ctx: Any, divergence: Tensor, acceptance: Tensor, reverse: Tensor, objective: Objective, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What both functions return; and what their backward passes need is noted."""
    ctx.objective, ctx.temperature = objective, temperature
    ctx.mark_non_differentiable(divergence, acceptance)
    rejection = 1 - acceptance
    if objective == "tv":  # no product of 0 and what may be infinite
        return temperature**2 * rejection, divergence, acceptance
    if objective == "reverse_kl":
        return temperature**2 * reverse, divergence, acceptance
    share = _share_of_kl(objective, acceptance)
    return temperature**2 * (share * divergence + (1 - share) * rejection), divergence, acceptance


def _share_of_kl(objective: Objective, acceptance: Tensor) -> Tensor:
    """λ of `token_losses`, token by token."""
    if objective == "hybrid":
        return (-ETA * acceptance).exp()
    return torch.full_like(acceptance, float(objective == "kl"))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(student: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and the student's log-probabilities at the temperature, which may be overwritten."""
    size = max(1, (CPU_CHUNK if student.device.type == "cpu" else CHUNK) // student.shape[1])
    for start in range(0, len(student), size):
        rows = slice(start, start + size)
        yield rows, _log_softmax(student[rows], temperature)


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


def targets_of(batch: Batch) -> Tensor:
    """The targets of a batch, (...), read as `core.task.cross_entropy` does.

    Raises:
        ConfigError: the batch has none.
    """
    if isinstance(batch, Mapping):
        targets = batch.get("targets")
        if targets is None and isinstance(labels := batch.get("labels"), Tensor):
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if labels.ndim > 1 else labels
    else:
        targets = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    if not isinstance(targets, Tensor):
        raise ConfigError(
            "there are no targets in the batch, which say which tokens count",
            hint="give `targets` or `labels` in a mapping, or a pair of inputs and targets",
        )
    return targets


def counted(batch: Batch) -> Tensor:
    """Which positions of a batch have a target that counts; bool (...)."""
    return targets_of(batch) != IGNORED


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
