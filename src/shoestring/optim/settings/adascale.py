"""Settings of AdaScale, which adapts the learning rate of large batches to the gradient noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Curve, Feature, Reduction, Seam, splitting
from shoestring.optim.settings.averaging import trains_apart
from shoestring.optim.settings.ranges import at_least_zero

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class AdaScale(Feature):
    """Scale the learning rate of a large batch by a gain measured from the gradient noise (Johnson et al., 2020).

    `run.steps`, the learning rate and its schedule keep their values for the small batch. Each large-batch step counts
    as several small-batch steps; the gain is their number.
    """

    scale: float = 0.0
    """Batch size, as a multiple of the small batch for which the learning rate and `run.steps` were chosen; 0 takes the
    number of micro-batches on all ranks."""
    rule: Literal["auto", "sgd", "adam"] = "auto"
    """Factor of the learning rate: the gain (`sgd`), or the square root of the gain, which is then measured after
    Adam's scaling (`adam`); `auto` follows the optimizer."""
    decay: float = -1.0
    """Decay rate, below 1, of the running averages of gradient variance and squared norm; a negative value takes
    1 - scale / 1000."""
    consecutive: bool = False
    """Estimate the noise from the gradients of consecutive steps, which takes memory for one more gradient. Required
    with one rank and one micro-batch, and with FSDP, whose ranks have no gradients of their own."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        at_least_zero(self, "scale")
        if 0 < self.scale < 1:
            raise ConfigError(f"`{self.name}.scale` must be 1 or more, or 0 to count micro-batches, got {self.scale}")
        if self.decay >= 1:
            raise ConfigError(f"`{self.name}.decay` must be below 1, got {self.decay}")
        self._check_exact(attachments)
        if attachments.divided == "parameters" and not self.consecutive:
            raise ConfigError(
                f"`{self.name}` needs the gradients of single ranks, which FSDP does not keep",
                hint=f"set {self.name}.consecutive = true",
            )
        if (names := splitting(attachments.features, attachments.world)) and not self.consecutive:
            raise ConfigError(
                f"`{self.name}` measures whole gradients of micro-batches, but with `{names[0]}` a rank has parts only",
                hint=f"set {self.name}.consecutive = true",
            )
        if self.consecutive and not self.scale:
            raise ConfigError(f"`{self.name}.consecutive` needs `scale`, the batch size in small batches")

    def _check_exact(self, attachments: Attachments) -> None:
        """Raise ConfigError if ranks take local steps, or if gradients are inexact, because errors would be measured as
        noise."""
        from shoestring._torch import has_hook
        from shoestring.core.whole_batch import is_over_whole_batch

        apart = trains_apart(attachments)
        if is_over_whole_batch(attachments):
            raise ConfigError(
                f"`{self.name}` compares gradients of parts of a batch, but the loss is over the whole batch",
                hint=f"remove [{self.name}]",
            )
        exchanges = [feature for feature in attachments.features if Seam.WIRE in feature.seams and feature.inexact]
        if self.consecutive:  # this mode compares averaged gradients, in which rounding is negligible
            exchanges = [feature for feature in exchanges if feature.inexact != "numbers"]
        inexact = exchanges[0].name if exchanges else ""
        if apart is not None:
            raise ConfigError(
                f"`{self.name}` needs the gradients of all ranks at each step, but `{apart.name}` exchanges none",
                hint=f"remove [{apart.name}] or [{self.name}]",
            )
        if inexact or has_hook(attachments.model):
            what = f"`{inexact}`" if inexact else "DDP's communication hook"
            raise ConfigError(
                f"`{self.name}` would measure the errors of {what} as gradient noise",
                hint="exchange exact gradients: parallel.DDP, or comm.Dense without `transport.kb_per_step`",
            )
        divides = next((feature for feature in attachments.features if feature.divided == "optimizer"), None)
        if divides is not None and not self.consecutive and self.rule != "sgd":
            owner = next((feature for feature in attachments.features if Seam.OPTIM in feature.seams), None)
            if self.rule == "adam" or owner is None or hasattr(owner, "betas"):
                raise ConfigError(
                    f"`{self.name}` needs Adam's second moments whole, and `{divides.name}` divides them among ranks",
                    hint=f'set {self.name}.consecutive = true, or {self.name}.rule = "sgd"',
                )

    def check_gradients(self, count: int) -> None:
        """Raise ConfigError if a step has only one gradient, because noise cannot be estimated from one.

        Args:
            count: number of gradients in a step: micro-batches on all ranks.
        """
        if count == 1 and not self.consecutive:
            raise ConfigError(
                f"`{self.name}` cannot measure noise from one gradient a step (one rank, no accumulation)",
                hint=f"set {self.name}.consecutive = true, or run.accumulate",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.adascale import follow_gain

        follow_gain(attachments, self)

    def explain(self, attachments: Attachments) -> str:
        return "steps of the run and of its schedule are those of the small batch"

    def reduction(self, trace: Trace) -> Reduction | None:
        worth, steps = trace.facts.get("adascale_position", 0.0), trace.steps
        if not (worth and steps):
            return None
        noise = trace.facts.get("noise_scale", 0.0)
        cost = f"{trace.facts['adascale_scale']:g} times the samples a step; beyond a batch of {noise:.3g} times the "
        return Reduction(
            unit="optimizer steps", used=steps, without=worth, measured=True, cost=cost + "small one steps gain little"
        )

    def report_items(self, trace: Trace) -> Sequence[Curve]:
        gain = Curve(title="Gain of a step", metrics={"gain": "Gain"}, unit="steps of the small batch")
        noise = Curve(title="Noise scale", metrics={"noise_scale": "Noise scale"}, unit="small batches")
        return gain, noise


AdaScale.neutral = AdaScale(scale=1.0, consecutive=True)
