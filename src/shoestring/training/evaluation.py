"""Held-out loss, metrics of the user's own, and what follows from them: early stopping and the best model so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.data.loader import sweep
from shoestring.naming import resolve
from shoestring.run import Run
from shoestring.training.data_loading import DataSets, to_device

PART = 64  # held-out samples of an evaluation during the run


def evaluate(job: Job, run: Run, data: DataSets, limit: int = 0) -> dict[str, float]:
    """The held-out loss over the first `limit` samples (0: all), if there are any, and what `run.evaluate` returns.

    A collective. Of a mixture the loss is over all sources together, and `held_out_loss_NAME` is that of each.
    """
    values = _held_out(job, run, data, limit) if data.held_out is not None else {}
    return values | _own_metrics(job, run.settings.evaluate) if run.settings.evaluate else values


def _held_out(job: Job, run: Run, data: DataSets, limit: int) -> dict[str, float]:
    assert data.held_out is not None
    rank, size = job.world.index_over(job.data_axes), job.world.ranks_over(job.data_axes)
    micro = max(1, run.settings.batch // (size * run.settings.accumulate))
    parts = data.corpus.parts if data.corpus else {}
    held_out = {name: part.held_out for name, part in parts.items()} or {"": data.held_out}
    sums: dict[str, tuple[float, int]] = {}
    for name, samples in held_out.items():
        batches = sweep(samples, batch=micro, rank=rank, size=size, limit=-(-limit // len(held_out)))
        sums[name] = job.evaluate(to_device(batch, job.world.device) for batch in batches)
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    loss = total / max(count, 1)
    values = {"held_out_loss": loss}
    if data.corpus:
        values["held_out_bits_per_byte"] = loss * data.bits(held_out=True)
    return values | {f"held_out_loss_{name}": total / max(count, 1) for name, (total, count) in sums.items() if name}


def _own_metrics(job: Job, target: str) -> dict[str, float]:
    """What the user's own evaluation returns on the first rank, on all of them."""
    own = resolve(target, "run.evaluate")
    with job.evaluating(), job.computing():
        returned = own(job.model)

    def numbers() -> dict[str, float]:
        try:
            return {str(name): float(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError) as error:
            said = f"`run.evaluate`: `{target}` returned {returned!r}, which is no dict of numbers"
            raise ConfigError(said, hint='return {"accuracy": 0.5}, for example') from error

    return job.world.decide(numbers)


@dataclass(eq=False)
class Best:
    """The lowest held-out loss of the evaluations during a run; it is kept, so that a resumed run goes by it, too."""

    loss: float = math.inf
    step: int = 0
    """Step of that evaluation."""
    seen: int = 0
    """Step of the newest evaluation."""
    since: int = 0
    """Evaluations since the best one."""

    def take(self, step: int, loss: float) -> bool:
        """Take an evaluation; whether it is the best so far."""
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


@dataclass(eq=False)
class Evaluations:
    """The evaluations during a run: each `run.evaluate_every` steps, and at the end where the best model is kept."""

    job: Job
    run: Run
    data: DataSets
    save: Callable[[], object]
    """Writes the best model; a collective."""

    def __post_init__(self) -> None:
        settings = self.run.settings
        self.best = Best()
        self.lost_patience = False
        if settings.patience or settings.keep_best:
            if self.data.held_out is None:
                name = "patience" if settings.patience else "keep_best"
                raise ConfigError(f"`run.{name}` goes by the held-out loss, and there is no held-out data")
            self.job.keep("best", self.best)

    def after_step(self, write: Callable[[int, Mapping[str, float]], None]) -> None:
        """Evaluate where it is due, keep the model if it is the best, and end training where patience is lost.

        A collective, called after each step and once before the first: a checkpoint is written before the evaluation of
        its step, so a resumed run makes up for that.

        Args:
            write: takes the step and the metrics.
        """
        job, settings = self.job, self.run.settings
        step, follows = job.progress.step, "best" in job.kept
        regular = settings.evaluate_every and step % settings.evaluate_every == 0
        last = settings.keep_best and job.progress.done  # so that there is a best one after fewer steps, too
        due = step and step != self.best.seen and (regular or last)
        if due and (follows or not job.progress.done):  # else the evaluation on all held-out data follows at once
            values = evaluate(job, self.run, self.data, PART)
            write(step, values)
            if follows and self.best.take(step, values["held_out_loss"]) and settings.keep_best:
                self.save()
        if 0 < settings.patience <= self.best.since and not job.done:
            self.lost_patience = True
            job.finish()

    def notes(self) -> list[str]:
        """What is to be said of them in the report."""
        said = []
        if self.lost_patience:
            said.append(f"ended early: {self.best.since} evaluations without a lower held-out loss")
        if self.best.step:
            where = ", in the folder `best`" if self.run.settings.keep_best else ""
            said.append(f"lowest held-out loss during the run: {self.best.loss:.4f} after step {self.best.step}{where}")
        return said
