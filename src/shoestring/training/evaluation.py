"""Evaluate during a run: held-out loss, the user's own metrics, early stopping, and saving the best model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.trace import span
from shoestring.data.chat_ends import ends_learnt
from shoestring.data.loader import sweep
from shoestring.decode.harness.tasks import Tasks
from shoestring.models.description import describe_model
from shoestring.run import Settings
from shoestring.training.data_loading import DataSets, to_device

PART = 64  # number of held-out samples, and of documents of each task, that an evaluation during the run uses
Own = Callable[..., Any] | Tasks
"""What `run.evaluate` names: the user's own function, or tasks of lm-evaluation-harness."""


def evaluate(job: Job, settings: Settings, data: DataSets, own: Own | None = None, limit: int = 0) -> dict[str, float]:
    """Compute the held-out loss, if there is held-out data, and the metrics that `own` returns. A collective.

    For a mixture, `held_out_loss` covers all sources, and `held_out_loss_NAME` covers one source.

    Args:
        own: what `run.evaluate` names.
        limit: number of held-out samples, and of documents of each task, to use; 0 uses all.
    """
    values = _held_out(job, settings, data, limit) if data.held_out is not None else {}
    if isinstance(own, Tasks):
        return values | _task_metrics(job, settings, data, own, limit)
    return values | _own_metrics(job, own, settings.evaluate) if own is not None else values


def _held_out(job: Job, settings: Settings, data: DataSets, limit: int) -> dict[str, float]:
    assert data.held_out is not None
    axes = attachments_of(job).data_axes
    rank, size, micro = job.world.index_over(axes), job.world.ranks_over(axes), _micro(job, settings)
    parts = data.corpus.parts if data.corpus else {}
    held_out = {name: part.held_out for name, part in parts.items()} or {"": data.held_out}
    sums: dict[str, tuple[float, int]] = {}
    attachments_of(job).evaluated.clear()
    for name, samples in held_out.items():
        share = -(-limit // len(held_out))
        batches = sweep(samples, batch=micro, rank=rank, size=size, limit=share, collate=data.collate)
        sums[name] = job.evaluate(to_device(batch, job.world.device) for batch in batches)
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    loss = total / max(count, 1)
    values = {"held_out_loss": loss}
    if bits := data.bits(held_out=True):
        values["held_out_bits_per_byte"] = loss * bits
    values |= {f"held_out_{name}": value for name, value in attachments_of(job).evaluated_means().items()}
    return values | {f"held_out_loss_{name}": total / max(count, 1) for name, (total, count) in sums.items() if name}


def _micro(job: Job, settings: Settings) -> int:
    """Number of samples in a forward pass of a rank: as in training, so that they fit into memory."""
    ranks = job.world.ranks_over(attachments_of(job).data_axes)
    return max(1, settings.batch // (ranks * settings.accumulate))


def _task_metrics(job: Job, settings: Settings, data: DataSets, tasks: Tasks, limit: int) -> dict[str, float]:
    """Run tasks of lm-evaluation-harness on every rank, and return the metrics of the first rank on all ranks.

    Every rank runs all documents, because the forward passes of a sharded model are collectives.
    """
    from shoestring.decode.harness.model import HarnessModel

    assert data.corpus is not None  # `check_form` refuses tasks for other data
    attachments, tokenizer = attachments_of(job), data.corpus.tokenizer
    with attachments.evaluating(), attachments.computing(), span("tasks", "compute"):
        ends = {*describe_model(settings.model, tokenizer, warn=False).ends, *ends_learnt(data.corpus.train, tokenizer)}
        model = HarnessModel(attachments.module, tokenizer, ends, batch=_micro(job, settings))
        with closing(model):
            values = tasks.metrics(model, limit or None)
    return job.world.decide(lambda: values)


def _own_metrics(job: Job, own: Callable[..., Any], target: str) -> dict[str, float]:
    """Call the user's own evaluation on every rank, and return the metrics of the first rank on all ranks."""
    with attachments_of(job).evaluating(), attachments_of(job).computing():
        returned = own(job.model)

    def numbers() -> dict[str, float]:
        try:
            return {str(name): float(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError) as error:
            message = f"`run.evaluate`: `{target}` returned {returned!r}, not a dict of numbers"
            raise ConfigError(message, hint='return {"accuracy": 0.5}, for example') from error

    return job.world.decide(numbers)


@dataclass(eq=False)
class Best:
    """The lowest held-out loss that evaluations have found so far in a run; saved in checkpoints."""

    loss: float = math.inf
    step: int = 0
    """Step at which the lowest loss was found."""
    seen: int = 0
    """Step of the newest evaluation."""
    since: int = 0
    """Number of evaluations since the lowest loss was found."""

    def take(self, step: int, loss: float) -> bool:
        """Record the loss of an evaluation, and return whether it is the lowest so far."""
        self.seen = step
        if better := loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
        else:
            self.since += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        vars(self).update(state_dict)


def check_evaluations(settings: Settings, data: DataSets | None) -> None:
    """Raise ConfigError if a setting needs the held-out loss, but no data is held out.

    Args:
        data: the data sets; None for text that was not prepared, of which training will hold out some.
    """
    for name in ("patience", "save_best"):
        if getattr(settings, name) and data is not None and data.held_out is None:
            hint = "let `run.data` return a pair of data sets, the second of them held out"
            raise ConfigError(f"`run.{name}` needs the held-out loss, but there is no held-out data", hint=hint)


@dataclass(eq=False)
class Evaluations:
    """Evaluates every `run.evaluate_every` steps of a run and, with `run.save_best`, also after the last step."""

    job: Job
    settings: Settings
    data: DataSets
    own: Own | None
    """What `run.evaluate` names."""
    save: Callable[[], object]
    """Writes the model to the folder of the best model; a collective."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.best = Best()
        self.lost_patience = False
        check_evaluations(settings, self.data)
        if isinstance(self.own, Tasks):
            self.own.load()  # before the first step, because a task's data may be missing
        if settings.patience or settings.save_best:
            self.job.keep("best", self.best)

    def after_step(self, write: Callable[[int, Mapping[str, float]], None]) -> None:
        """Evaluate if due, save the model if it is the best so far, and end training if it stops early. A collective.

        Training stops early after `run.patience` evaluations without a lower loss. The method is also called before
        the first step: a checkpoint is written before its step is evaluated, so a resumed run may have to do that
        evaluation.

        Args:
            write: (step, metrics) -> None; writes the metrics of an evaluation.
        """
        job, settings = self.job, self.settings
        step, follows = job.progress.step, "best" in job.kept
        values: dict[str, float] = {}
        better = False
        if self.due and step != self.best.seen:
            values = evaluate(job, settings, self.data, self.own, PART)
            better = follows and self.best.take(step, values["held_out_loss"])
        ends = 0 < settings.patience <= self.best.since and not job.done
        if values and not (ends or job.progress.done):  # otherwise the final evaluation is written for this step
            write(step, values)
        if better and settings.save_best:
            self.save()
        if ends:
            self.lost_patience = True
            job.finish()

    @property
    def due(self) -> bool:
        """Whether the newest step is to be evaluated."""
        job, settings = self.job, self.settings
        step, follows = job.progress.step, "best" in job.kept
        regular = settings.evaluate_every and step % settings.evaluate_every == 0
        last = settings.save_best and job.progress.done  # so a run shorter than the interval also has a best model
        # After the last step all held-out data is evaluated anyway, so this evaluation only serves to find the best
        # model.
        return bool(step and (regular or last) and (follows or not job.progress.done))

    def notes(self) -> list[str]:
        """Lines for the report."""
        lines = []
        if self.lost_patience:
            lines.append(f"ended early: {self.best.since} evaluations without a lower held-out loss")
        if self.best.step:
            where = ", in the folder `best`" if self.settings.save_best else ""
            lines.append(
                f"lowest held-out loss during the run: {self.best.loss:.4f} after step {self.best.step}{where}"
            )
        return lines
