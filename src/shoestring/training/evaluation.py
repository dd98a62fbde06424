"""Evaluate during a run: held-out loss, the user's own metrics, early stopping, and saving the best model."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import Table
from shoestring.core.job import Job, attachments_of
from shoestring.core.trace import span
from shoestring.core.whole_batch import is_over_whole_batch
from shoestring.data.chat_ends import ends_learnt
from shoestring.decode.harness.tasks import Tasks
from shoestring.models.description import describe_model
from shoestring.report.findings import MOST_ITEMS, Finding, Picture
from shoestring.run import Settings
from shoestring.training.data_loading import DataSets
from shoestring.training.held_out import HeldOut

log = logging.getLogger("shoestring")

Own = Callable[..., Any] | Tasks
"""The user's own function, or tasks of lm-evaluation-harness: the possible values of `run.evaluate`."""


class Evaluated(NamedTuple):
    """The results of an evaluation."""

    values: dict[str, float]
    """Metrics by name, equal on all ranks."""
    findings: dict[str, Finding]
    """Tables and pictures by name; filled only on the first rank."""


def evaluate(job: Job, settings: Settings, data: DataSets, own: Own | None = None, limit: int = 0) -> Evaluated:
    """Compute the held-out loss, if there is held-out data, and the metrics that `own` returns. A collective.

    For a mixture, `held_out_loss` covers all sources, and `held_out_loss_NAME` covers one source.

    Args:
        own: the function or the tasks that `run.evaluate` names.
        limit: maximum number of held-out samples, and of documents per task; 0 uses all.
    """
    values = _held_out(job, settings, data, limit) if data.held_out is not None else {}
    if isinstance(own, Tasks):
        return Evaluated(values | _task_metrics(job, settings, data, own, limit), {})
    if own is None:
        return Evaluated(values, {})
    results = _own_results(job, settings, data, own, limit)
    return Evaluated(values | results.values, results.findings)


def _held_out(job: Job, settings: Settings, data: DataSets, limit: int) -> dict[str, float]:
    assert data.held_out is not None
    micro = _micro(job, settings)
    parts = data.corpus.parts if data.corpus else {}
    held_out = {name: part.held_out for name, part in parts.items()} or {"": data.held_out}
    sums: dict[str, tuple[float, int]] = {}
    attachments_of(job).evaluated.clear()
    for name, samples in held_out.items():
        sums[name] = job.evaluate(HeldOut(job, data, samples, micro, -(-limit // len(held_out))).parts())
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    loss = total / max(count, 1)
    values = {"held_out_loss": loss}
    if bits := data.bits(held_out=True):
        values["held_out_bits_per_byte"] = loss * bits
    values |= {f"held_out_{name}": value for name, value in attachments_of(job).evaluated_means().items()}
    return values | {f"held_out_loss_{name}": total / max(count, 1) for name, (total, count) in sums.items() if name}


def _micro(job: Job, settings: Settings) -> int:
    """Number of samples in a rank's forward pass; the same as in training, so that the pass fits into memory.

    A loss over the whole batch gets all of a rank's samples at once, as in training.
    """
    ranks = job.world.ranks_over(attachments_of(job).data_axes)
    passes = 1 if is_over_whole_batch(attachments_of(job)) else settings.accumulate
    return max(1, settings.batch // (ranks * passes))


def _task_metrics(job: Job, settings: Settings, data: DataSets, tasks: Tasks, limit: int) -> dict[str, float]:
    """Run tasks of lm-evaluation-harness on every rank, and return the metrics of the first rank on all ranks.

    Every rank runs all documents, because the forward passes of a sharded model are collectives.
    """
    from shoestring.decode.harness.model import HarnessModel

    assert data.corpus is not None  # `check_form` refuses tasks for data that is not text
    attachments, tokenizer = attachments_of(job), data.corpus.tokenizer
    with attachments.evaluating(), attachments.computing(), span("tasks", "compute"):
        ends = {*describe_model(settings.model, tokenizer, warn=False).ends, *ends_learnt(data.corpus.train, tokenizer)}
        model = HarnessModel(attachments.module, tokenizer, ends, batch=_micro(job, settings))
        with closing(model):
            values = tasks.metrics(model, limit or None)
    return job.world.decide(lambda: values)


def takes_held_out(own: Callable[..., Any]) -> bool:
    """Whether the user's evaluation needs a second argument, which is the held-out data."""
    try:
        parameters = inspect.signature(own).parameters.values()
    except ValueError:  # a builtin
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(entry.kind in positional and entry.default is entry.empty for entry in parameters) > 1


def _own_results(job: Job, settings: Settings, data: DataSets, own: Callable[..., Any], limit: int) -> Evaluated:
    """Call the user's own evaluation on every rank, and return the metrics of the first rank on all ranks."""
    attachments, arguments = attachments_of(job), []
    if takes_held_out(own):
        assert data.held_out is not None  # otherwise `check_evaluations` has raised an error
        arguments = [HeldOut(job, data, data.held_out, _micro(job, settings), limit)]
    with attachments.evaluating(), attachments.computing():
        returned = own(attachments.module, *arguments)
    findings: dict[str, Finding] = {}

    def numbers() -> dict[str, float]:
        try:
            results = {str(name): _result(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError) as error:
            message = f"`run.evaluate`: `{settings.evaluate}` returned {_short(returned)}, not a dict of numbers"
            raise ConfigError(
                message, hint='return {"accuracy": 0.5}; the dict may also hold tables and pictures'
            ) from error
        findings.update({name: value for name, value in results.items() if not isinstance(value, float)})
        for name in list(findings)[MOST_ITEMS:]:
            log.warning("`%s` is left out: an evaluation has at most %d tables and pictures", name, MOST_ITEMS)
            del findings[name]
        for item in findings.values():
            if isinstance(item, Picture):
                item.bytes_of_pixels()
        return {name: value for name, value in results.items() if isinstance(value, float)}

    return Evaluated(job.world.decide(numbers), findings)


def _result(value: Any) -> float | Finding:
    """Convert a result of the user's evaluation to a number, unless it is a table or a picture."""
    if isinstance(value, Table | Picture):
        return value
    if hasattr(value, "getbands") or (getattr(value, "ndim", 0) > 1 and math.prod(value.shape) != 1):
        return Picture(pixels=value)  # `value` is a Pillow image or an array
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}…"


@dataclass(eq=False)
class Best:
    """The best value of `run.best_metric` in the evaluations of a run so far; saved in checkpoints."""

    metric: str = "held_out_loss"
    mode: str = "min"
    value: float = math.nan
    step: int = 0
    """Step at which the best value was found; 0 before the first evaluation."""
    seen: int = 0
    """Step of the newest evaluation."""
    since: int = 0
    """Number of evaluations since the best value was found."""

    def take(self, step: int, value: float) -> bool:
        """Record the value of an evaluation, and return whether it is the best so far; NaN is never the best."""
        self.seen = step
        better = value < self.value if self.mode == "min" else value > self.value
        if better or (self.step == 0 and not math.isnan(value)):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    @property
    def words(self) -> tuple[str, str, str]:
        """The name of the metric, and the words for "better" and "best", such as "lower" and "lowest"."""
        name = "held-out loss" if self.metric == "held_out_loss" else self.metric
        return (name, "lower", "lowest") if self.mode == "min" else (name, "higher", "highest")

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the saved values, unless they belong to a different metric."""
        state = dict(state_dict)
        if "loss" in state:  # checkpoints of earlier versions
            state |= {"metric": "held_out_loss", "mode": "min", "value": state.pop("loss")}
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            vars(self).update(state)


def check_evaluations(settings: Settings, data: DataSets | None, own: Own | None) -> None:
    """Raise ConfigError if a setting needs held-out data but there is none, or a metric that no evaluation returns.

    Args:
        data: the data sets; None for text that is not prepared yet, of which training will hold out a part.
        own: the function or the tasks that `run.evaluate` names.
    """
    none, metric = data is not None and data.held_out is None, settings.best_metric
    hint = "let `run.data` return a pair of data sets: training data and held-out data"
    for name in ("patience", "save_best"):
        if getattr(settings, name) and none and metric.startswith("held_out_"):
            what = "the held-out loss" if metric == "held_out_loss" else f"`{metric}`"
            raise ConfigError(f"`run.{name}` needs {what}, but there is no held-out data", hint=hint)
        if getattr(settings, name) and not metric.startswith("held_out_") and own is None:
            hint = "let run.evaluate name a function that returns this metric"
            raise ConfigError(f"`run.best_metric` is `{metric}`, which no evaluation returns", hint=hint)
    if none and callable(own) and takes_held_out(own):
        raise ConfigError(f"`{settings.evaluate}` takes held-out data, but there is none", hint=hint)


@dataclass(eq=False)
class Evaluations:
    """Evaluates every `run.evaluate_every` steps of a run and, with `run.save_best`, also after the last step."""

    job: Job
    settings: Settings
    data: DataSets
    own: Own | None
    """The function or the tasks that `run.evaluate` names."""
    save: Callable[[], object]
    """Function that writes the model to the folder of the best model; a collective."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.best = Best(settings.best_metric, settings.best_mode)
        self.lost_patience = False
        check_evaluations(settings, self.data, self.own)
        if isinstance(self.own, Tasks):
            self.own.load()  # fails before the first step if the data of a task is missing
        if settings.patience or settings.save_best:
            self.job.keep("best", self.best)

    def after_step(self, write: Callable[[int, Evaluated], None]) -> None:
        """Evaluate if due, save the model if it is the best so far, and end training if it stops early. A collective.

        Training stops early after `run.patience` evaluations without a better value. The loop also calls this method
        before the first step. The reason: a checkpoint is written before its step is evaluated, so a resumed run may
        still have to evaluate that step.

        Args:
            write: function (step, results) -> None that writes the results of an evaluation.
        """
        job, settings = self.job, self.settings
        step, follows = job.progress.step, "best" in job.kept
        results: Evaluated | None = None
        better = False
        if self.due and step != self.best.seen:
            results = evaluate(job, settings, self.data, self.own, settings.evaluate_samples)
            if follows and (metric := self.best.metric) not in results.values:
                hint = nearest(metric, results.values)
                raise ConfigError(f"`run.best_metric`: no evaluation returns `{metric}`", hint=hint)
            better = follows and self.best.take(step, results.values[self.best.metric])
        ends = 0 < settings.patience <= self.best.since and not job.done
        if results and not (ends or job.progress.done):  # after the last step, the final evaluation is written instead
            write(step, results)
        if better and settings.save_best:
            self.save()
        if ends:
            self.lost_patience = True
            job.finish()

    @property
    def due(self) -> bool:
        """Whether to evaluate after the newest step."""
        job, settings = self.job, self.settings
        step, follows = job.progress.step, "best" in job.kept
        regular = settings.evaluate_every and step % settings.evaluate_every == 0
        last = settings.save_best and job.progress.done  # so that a run shorter than the interval has a best model too
        # After the last step the run evaluates on all held-out data anyway, so this evaluation only serves to find the
        # best model.
        return bool(step and (regular or last) and (follows or not job.progress.done))

    def notes(self) -> list[str]:
        """Lines for the report on early stopping and the best model."""
        lines = []
        name, better, best = self.best.words
        if self.lost_patience:
            lines.append(f"ended early: {self.best.since} evaluations without a {better} {name}")
        if self.best.step:
            where = ", in the folder `best`" if self.settings.save_best else ""
            lines.append(f"{best} {name} during the run: {self.best.value:.4f} after step {self.best.step}{where}")
        return lines
