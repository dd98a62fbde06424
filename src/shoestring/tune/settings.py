"""The tables of a study file; free of torch and of Optuna."""

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
    """Metric of metrics.jsonl to optimize; its last value is the result of a trial."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Direction in which the objective improves."""
    trials: int = 20
    """Number of trials after which no new one starts."""
    hours: float = 0.0
    """Hours of work, over all workers, after which no new trial starts. 0 sets no limit."""
    sampler: Literal["random", "tpe", "gp"] = "gp"
    """Method that proposes settings: `random`; `tpe`, Optuna's tree-structured Parzen estimator; or `gp`, a Gaussian
    process with expected improvement, which takes running trials into account."""
    seed: int = 0
    """Seed of the sampler; each trial continues its sequence."""
    lease: float = 60.0
    """Seconds after which a trial of a worker that has fallen silent is given to another. A shorter lease loses less
    time, and needs more requests to the store."""
    grace: float = 30.0
    """Seconds that a trial has to write its checkpoint after SIGTERM, before it is killed."""
    attempts: int = 3
    """Number of times that a trial is started again after an unexpected failure, before it is marked as failed."""
    store: str = ""
    """Database of the study, as an SQLAlchemy URL: `postgresql+psycopg://USER@HOST/NAME` for several hosts; defaults to
    an SQLite file in the folder of the study."""
    folder: str = ""
    """Folder of the trials, which all workers must see; defaults to `tune/NAME`."""

    def __post_init__(self) -> None:
        for key in ("trials", "attempts"):
            if getattr(self, key) < 1:
                raise ConfigError(f"`tune.{key}` must be at least 1, got {getattr(self, key)}")
        for key in ("lease", "grace"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"`tune.{key}` must be positive, got {getattr(self, key)}")
        if self.hours < 0:
            raise ConfigError(f"`tune.hours` must not be negative, got {self.hours}")


@dataclass(frozen=True, kw_only=True)
class Halving:
    """The table [halving]: asynchronous successive halving (ASHA, https://arxiv.org/abs/1810.05934)."""

    first: int
    """Step at which trials are first compared."""
    factor: int = 3
    """Factor between the steps of two comparisons; the best 1/factor of the trials that reached one continue."""

    def __post_init__(self) -> None:
        if self.first < 1 or self.factor < 2:
            raise ConfigError("`halving.first` must be at least 1 and `halving.factor` at least 2")

    def step(self, rung: int) -> int:
        """Step at which the trials of a rung pause."""
        return self.first * self.factor**rung
