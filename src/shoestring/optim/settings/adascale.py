"""Learning rates for large batches from how noisy gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Curve, Feature, Reduction, Seam
from shoestring.optim.settings.ranges import at_least_zero

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class AdaScale(Feature):
    """Larger steps for larger batches, by how noisy gradients are (Johnson et al., 2020).

    `run.steps`, the learning rate and its schedule stay those of the small batch; a step of the large batch counts for
    as many of them as it is worth, its gain.
    """

    scale: float = 0.0
    """Size of the batch, as a multiple of the one that the learning rate and `run.steps` are for; 0 takes the number of
    micro-batches on all ranks."""
    rule: Literal["auto", "sgd", "adam"] = "auto"
    """Factor of the learning rate: the gain (`sgd`), or its root, with gradients measured as Adam scales them (`adam`);
    `auto` takes what belongs to the optimizer."""
    smoothing: float = -1.0
    """Weight of the past in the running averages of both estimates, below 1; negative takes 1 - scale / 1000."""
    consecutive: bool = False
    """Whether noise is estimated from gradients of consecutive steps, which takes memory for one more gradient. Needed
    where there is one rank and one micro-batch, and under FSDP, whose ranks have no gradient of their own."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        at_least_zero(self, "scale")
        if 0 < self.scale < 1:
            raise ConfigError(f"`{self.name}.scale` must be 1 or more, or 0 to find it, got {self.scale}")
        if self.smoothing >= 1:
            raise ConfigError(f"`{self.name}.smoothing` must be below 1, got {self.smoothing}")
        if job.engine == "fsdp" and not self.consecutive:
            raise ConfigError(
                f"`{self.name}` finds no gradients of single ranks under FSDP",
                hint=f"set {self.name}.consecutive = true",
            )
        if self.consecutive and not self.scale:
            raise ConfigError(f"`{self.name}.consecutive` needs `scale`, how many small batches a batch is")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.adascale import follow_gain

        follow_gain(job, self)

    def explain(self, job: Job) -> str:
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
