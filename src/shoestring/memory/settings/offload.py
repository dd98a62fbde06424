"""Settings of offloading: the CPU holds and updates optimizer state and master weights in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Inexact, Reduction
from shoestring.memory.settings.zero import Zero
from shoestring.planning.step import Situation

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.memory.offload.late import LateSteps
    from shoestring.memory.zero.attached import Divided
    from shoestring.memory.zero.buckets import ShardedParameter
    from shoestring.memory.zero.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Offload(Zero):
    """Hold optimizer state and master weights in host memory, and update them on the CPU (ZeRO-Offload, Ren 2021).

    Gradients are copied to the host while the backward pass computes them. Updated weights are copied to the device
    while other weights are still being updated and while the next forward pass begins. Several ranks divide the state
    among them, as `memory.zero` does.
    """

    late: float = 0.0
    """Fraction of the weights, those with the smallest gradients, that the CPU updates while the device computes the
    next step, so that their updates take effect one step late. A larger fraction overlaps more of the CPU's time but
    changes the result of training; 0 changes nothing."""

    @property
    def inexact(self) -> Inexact:
        return "numbers" if self.late else ""

    @classmethod
    def alternatives(cls, situation: Situation) -> list[Zero]:
        return []  # offloading is for GPUs, and the planner does not measure a GPU's link to the host

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        if not 0 <= self.late <= 1:
            raise ConfigError(f"`{self.name}.late` must be from 0 to 1, got {self.late}")
        if attachments.world.device.type == "cuda" and attachments.world.ranks_over(self.over) > 1:
            raise ConfigError(f"`{self.name}` supports one GPU only", hint="use [memory.zero] with several GPUs")

    def steps_copies(self, parameters: Iterable[Tensor]) -> bool:
        return True

    def placement(self, attachments: Attachments, parts: Sequence[ShardedParameter]) -> Placement:
        from shoestring.memory.offload.placement import OnHost

        return OnHost(attachments, parts, self.master == "fp32", twice=self.late > 0)

    def late_steps(self, divided: Divided) -> LateSteps | None:
        from shoestring.memory.offload.late import LateSteps
        from shoestring.memory.offload.placement import OnHost

        placement = divided.weights.placement
        return LateSteps(self.late, divided, placement) if self.late and isinstance(placement, OnHost) else None

    def explain(self, attachments: Attachments) -> str:
        ranks = attachments.world.ranks_over(self.divided_over)
        late = f", {100 * self.late:g} % one step late" if self.late else ""
        return "stepped by the CPU" + (f", divided among {ranks} ranks" if ranks > 1 else "") + late

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if "zero_held" not in facts:
            return None
        exposed = facts["zero_exposed"] / facts["zero_steps"]
        late = f"; {100 * facts['late_share']:.0f} % of the elements one step late" if "late_share" in facts else ""
        return Reduction(
            unit="GiB of parameters, gradients and optimizer state on the device of a rank",
            used=facts["zero_parameters"] / 2**30,
            without=facts["zero_without"] / 2**30,
            measured=True,
            cost=f"{figures.memory(facts['zero_held'] - facts['zero_parameters'])} of host memory; steps on the CPU; "
            f"{figures.seconds(exposed)} a step waited for copies" + late,
        )
