"""Weights that are averaged over steps, for evaluations and for what a run exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.optim.groups import Group, check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, positive

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class EMA(Feature):
    """Exponential moving average of the weights, for evaluations and for what a run exports."""

    decay: float = 0.999
    """Weight of the past in each step's average, below 1; it is smaller in the first steps, to forget the start."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"`{self.name}.decay` must lie in [0, 1), got {self.decay}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.averaging import MovingAverage, attach

        attach(job, self.name, MovingAverage(self.decay))

    def export(self, weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.optim.averaging import exported

        return exported(weights, kept[self.name]["average"])


@dataclass(frozen=True, kw_only=True)
class LAWA(Feature):
    """Mean of the latest weights that were set aside (Kaddour, 2022), for evaluations and for what a run exports."""

    count: int = 5
    """Number of weights that are averaged; each takes the memory of the model's."""
    every: int = 50
    """Steps between two that are set aside."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        for name in ("count", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{self.name}.{name}` must be at least 1, got {getattr(self, name)}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.averaging import LatestAverage, attach

        attach(job, self.name, LatestAverage(self.count, self.every))

    def export(self, weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.optim.averaging import exported

        return exported(weights, kept[self.name]["average"])


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Feature):
    """AdamW that averages its weights in place of a schedule (Defazio et al., 2024); they need no number of steps.

    Evaluations and what a run exports take the average.
    """

    lr: float = 2.5e-3
    """Learning rate, constant after a warm-up by [optim.schedule] with `shape = "constant"`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Interpolation between the average and the newest weights, at which gradients are taken; decay rate of the running
    average of squared gradients."""
    eps: float = 1e-8
    """Constant added to the root of that average, against division by zero."""
    weight_decay: float = 0.1
    """Weight decay of matrices and larger tensors; biases and norms do not decay."""
    groups: tuple[Group, ...] = ()
    """Tables with `pattern`, `lr_scale` and `decay_scale` for parameters by name; the first that matches counts."""

    seams: ClassVar = (Seam.OPTIM, Seam.STEP)

    def check(self, job: Job) -> None:
        positive(self, "lr", "eps")
        at_least_zero(self, "weight_decay")
        betas_below_one(self, self.betas)
        if not self.betas[0]:
            raise ConfigError(f"`{self.name}.betas` must begin with a positive number: the average follows from it")
        check_groups(self, self.groups, job)
        for feature in job.features:
            if feature.name == "optim.schedule" and getattr(feature, "shape", "") != "constant":
                hint = 'set optim.schedule.shape = "constant"'
                raise ConfigError(f"`{self.name}` replaces the decay of the learning rate", hint=hint)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.schedule_free import build_schedule_free, evaluate_average

        (build_schedule_free if seam is Seam.OPTIM else evaluate_average)(job, self)

    def export(self, weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.optim.schedule_free import averaged

        return weights | {
            name: averaged(weights[name], state["z"], self.betas[0])
            for name, state in kept["optimizer"]["state"].items()
            if name in weights
        }
