"""The tables of a study file; importing this module imports neither torch nor Optuna."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoestring.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Study:
    """The table [tune]: the run whose settings are searched, the objective, the budget, and the store."""

    run: str
    """Run file, run folder, or name of a recipe, whose settings are searched."""
    name: str = "study"
    """Name of the study in its store."""
    objective: str = "held_out_loss"
    """Metric in metrics.jsonl to optimize; the metric's last value is the result of a trial."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Direction in which the objective improves."""
    trials: int = 20
    """Maximum number of trials. 0 sets no limit; `hours` or `tokens` must then be set."""
    hours: float = 0.0
    """Hours of work, summed over all workers, after which no trial starts or continues from a pause; if no trial has a
    result by then, the best trial continues to its end. 0 sets no limit."""
    tokens: float = 0.0
    """Number of training tokens, summed over all trials, after which no trial starts or continues from a pause; as with
    `hours`, the best trial continues if no trial has a result. 0 sets no limit."""
    sampler: Literal["random", "tpe", "gp"] = "gp"
    """Method that proposes settings: `random`; `tpe`, Optuna's tree-structured Parzen estimator; or `gp`, a Gaussian
    process with expected improvement, which takes running trials into account."""
    seed: int = 0
    """Seed of the sampler; together with a trial's number, it determines the random numbers of the trial's proposal."""
    lease: float = 60.0
    """Seconds after which the trial of a worker that no longer responds passes to another worker. A shorter lease loses
    less time and needs more requests to the store."""
    grace: float = 30.0
    """Maximum seconds for a trial to write its checkpoint after SIGTERM; then the trial is killed."""
    attempts: int = 3
    """Number of times that a trial is started again after an unexpected failure, before it is marked as failed."""
    store: str = ""
    """Database of the study, as an SQLAlchemy URL: `postgresql+psycopg://USER@HOST/NAME` for several hosts; defaults to
    an SQLite file in the folder of the study."""
    shared_store: bool = False
    """Whether the store may be a database that already has tables of another program; if false, such a database is
    refused and not changed."""
    folder: str = ""
    """Folder of the trials, to which all workers need access; defaults to `tune/NAME`."""

    def __post_init__(self) -> None:
        for key in ("trials", "hours", "tokens"):
            if getattr(self, key) < 0:
                raise ConfigError(f"`tune.{key}` must not be negative, got {getattr(self, key)}")
        if not (self.trials or self.hours or self.tokens):
            raise ConfigError("a study needs a budget", hint="set `tune.trials`, `tune.hours` or `tune.tokens`")
        if self.attempts < 1:
            raise ConfigError(f"`tune.attempts` must be at least 1, got {self.attempts}")
        for key in ("lease", "grace"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"`tune.{key}` must be positive, got {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class Halving:
    """The table [halving]: asynchronous successive halving (ASHA, https://arxiv.org/abs/1810.05934)."""

    first: int
    """Step at which trials are first compared."""
    factor: int = 3
    """Ratio of the steps of consecutive comparisons; the best 1/factor of the trials that reached a comparison
    continue."""

    def __post_init__(self) -> None:
        if self.first < 1 or self.factor < 2:
            raise ConfigError("`halving.first` must be at least 1 and `halving.factor` at least 2")

    def step(self, rung: int) -> int:
        """Step at which the trials of rung `rung`, counted from 0, pause."""
        return self.first * self.factor**rung


@dataclass(frozen=True, kw_only=True)
class Population:
    """The table [population]: population based training, in which new trials begin from checkpoints of good trials.
    This table replaces `tune.trials`: `size` trials start, and `size` trials run at any time until the last step."""

    size: int
    """Number of members that train at a time; with fewer members than workers, some workers are idle."""
    every: int
    """Steps between two comparisons of a member with other members. With a shorter interval, settings change more often
    and on less evidence, and starting processes takes more time."""
    method: Literal["pbt", "pb2"] = "pb2"
    """Method that chooses the settings of a fork: `pbt` changes the parent's settings at random; `pb2` takes the
    settings that a Gaussian process expects to improve the objective most, which needs fewer members."""
    truncation: float = 0.25
    """Fraction of the members that are replaced at a comparison, by forks of an equal fraction of the best members."""
    resample: float = 0.25
    """Probability that `pbt` draws a new value from a setting's whole range."""

    def __post_init__(self) -> None:
        if self.size < 2 or self.every < 1:
            raise ConfigError("`population.size` must be at least 2 and `population.every` at least 1")
        if not 0 < self.truncation <= 0.5:
            raise ConfigError(f"`population.truncation` must be above 0 and at most 0.5, got {self.truncation}")
        if not 0 <= self.resample <= 1:
            raise ConfigError(f"`population.resample` must be from 0 to 1, got {self.resample}")

    def step(self, rung: int) -> int:
        """Step of comparison number `rung`, counted from 0."""
        return self.every * (rung + 1)

    def time(self, rung: int) -> float:
        """Time coordinate of comparison number `rung` in the Gaussian process of `pb2`."""
        return float(rung + 1)
