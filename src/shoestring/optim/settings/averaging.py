"""Settings of averages of the weights, which evaluations and exports use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.optim.settings.bases import AdamSettings
from shoestring.optim.settings.groups import check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, positive

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments


def trains_apart(attachments: Attachments) -> Feature | None:
    """Return the feature that makes ranks take local steps: each rank trains its own weights, which are merged at
    intervals. The result is None without such a feature."""
    for feature in attachments.features:
        if feature.inexact in ("replicas", "fragments") and attachments.world.ranks_over(feature.over) > 1:
            return feature
    return None


def check_not_divided(feature: Feature, attachments: Attachments) -> None:
    """Raise ConfigError if another feature makes the optimizer update copies of the parameters (ZeRO, offloading)."""
    for owner in attachments.features:
        if owner.divided != "optimizer":
            continue
        copies = getattr(owner, "steps_copies", None)  # with offloading, copies are updated even on one rank
        if attachments.world.ranks_over(owner.over) > 1 or (copies and copies(attachments.trained.values())):
            raise ConfigError(
                f"`{feature.name}` cannot evaluate its weights: `{owner.name}` updates copies of the parameters",
                hint="use parallel.FSDP() or parallel.DDP()",
            )


def check_averaged(feature: Feature, attachments: Attachments) -> None:
    """Raise ConfigError if ranks never all hold the same weights, so that there are no common weights to average."""
    check_not_divided(feature, attachments)
    apart = trains_apart(attachments)
    if apart is not None and apart.inexact == "fragments":
        raise ConfigError(
            f"`{feature.name}` averages merged weights, and `{apart.name}` merges them in parts or late",
            hint=f"set {apart.name}.fragments = 1 and {apart.name}.delay = 0",
        )


@dataclass(frozen=True, kw_only=True)
class EMA(Feature):
    """Exponential moving average of the weights, for evaluations and exports.

    With local steps, the average is over the merged weights: one update at each merge, with the decay of all steps
    since the previous merge.
    """

    decay: float = 0.999
    """Weight of the previous average in each step's update, below 1. The first steps use a smaller value, to forget the
    initial weights."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"`{self.name}.decay` must lie in [0, 1), got {self.decay}")
        check_averaged(self, attachments)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.averaging import MovingAverage, attach

        attach(attachments, self.name, lambda: MovingAverage(self.decay))

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.optim.averaging import exported

        return exported(weights, states[self.name]["average"], states, self.name)


@dataclass(frozen=True, kw_only=True)
class LAWA(Feature):
    """Mean of the latest snapshots of the weights (Kaddour, 2022), for evaluations and exports.

    With local steps, a snapshot is taken at the first merge after its due step.
    """

    count: int = 5
    """Number of snapshots that are averaged; each takes as much memory as the model's weights."""
    every: int = 50
    """Steps between two snapshots."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        for name in ("count", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{self.name}.{name}` must be at least 1, got {getattr(self, name)}")
        check_averaged(self, attachments)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.averaging import LatestAverage, attach

        attach(attachments, self.name, lambda: LatestAverage(self.count, self.every))

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.optim.averaging import exported

        return exported(weights, states[self.name]["average"], states, self.name)


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(AdamSettings):
    """AdamW that averages its weights instead of decaying the learning rate (Defazio et al., 2024).

    The number of steps need not be known in advance. Evaluations and exports use the average.
    """

    lr: float = 2.5e-3
    """Learning rate, constant after a warm-up by [optim.schedule] with `shape = "constant"`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Two coefficients: the weight of the average in the interpolation between average and newest weights at which
    gradients are taken, and the decay rate of the running average of squared gradients."""
    weight_decay: float = 0.1
    """Weight decay of matrices and larger tensors; biases and norms do not decay."""

    seams: ClassVar = (Seam.OPTIM, Seam.STEP)

    def check(self, attachments: Attachments) -> None:
        positive(self, "lr", "eps")
        at_least_zero(self, "weight_decay")
        betas_below_one(self, self.betas)
        if not self.betas[0]:
            raise ConfigError(
                f"`{self.name}.betas` must begin with a positive number: computing the average divides by it"
            )
        check_groups(self, self.groups, attachments)
        check_not_divided(self, attachments)
        if apart := trains_apart(attachments):
            raise ConfigError(
                f"`{self.name}` averages each rank's own weights, which `{apart.name}` does not merge",
                hint="use optim.adamw, with optim.ema for an average of the merged weights",
            )
        for feature in attachments.features:
            if feature.name == "optim.schedule" and getattr(feature, "shape", "") != "constant":
                hint = 'set optim.schedule.shape = "constant"'
                raise ConfigError(f"`{self.name}` replaces the decay of the learning rate", hint=hint)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.schedule_free import build_schedule_free, evaluate_average

        (build_schedule_free if seam is Seam.OPTIM else evaluate_average)(attachments, self)

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.optim.averaging import exported
        from shoestring.optim.schedule_free import averaged

        averages = {
            name: averaged(weights[name], state["z"], self.betas[0])
            for name, state in states["optimizer"]["state"].items()
            if name in weights and state["step"][0]
        }
        return exported(weights, averages, states, self.name)
