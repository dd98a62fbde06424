"""Settings of offloading: optimizer state and master weights in host memory, stepped by the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Reduction
from shoestring.memory.settings.zero import Zero

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.memory.zero.buckets import ShardedParameter
    from shoestring.memory.zero.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Offload(Zero):
    """Hold optimizer state and master weights in host memory, and step them on the CPU (ZeRO-Offload, Ren 2021).

    Gradients are copied down while the backward pass makes them, and weights are copied up while others are stepped and
    while the next forward pass begins. Several ranks divide the state among them, as `memory.zero` does.
    """

    def check(self, job: Job) -> None:
        super().check(job)
        if job.world.device.type == "cuda" and job.world.ranks_over(self.over) > 1:
            raise ConfigError(f"`{self.name}` works with one GPU so far", hint="use [memory.zero] with several")

    def steps_copies(self, parameters: Iterable[Tensor]) -> bool:
        return True

    def placement(self, job: Job, parts: Sequence[ShardedParameter]) -> Placement:
        from shoestring.memory.offload.placement import OnHost

        return OnHost(job, parts, self.master == "fp32")

    def explain(self, job: Job) -> str:
        ranks = job.world.ranks_over(self.divided_over)
        return "stepped by the CPU" + (f", divided among {ranks} ranks" if ranks > 1 else "")

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if "zero_held" not in facts:
            return None
        exposed = facts["zero_exposed"] / facts["zero_steps"]
        return Reduction(
            unit="GiB of parameters, gradients and optimizer state on the device of a rank",
            used=facts["zero_parameters"] / 2**30,
            without=facts["zero_without"] / 2**30,
            measured=True,
            cost=f"{(facts['zero_held'] - facts['zero_parameters']) / 2**30:.3g} GiB of host memory; steps on the CPU; "
            f"{1e3 * exposed:.0f} ms a step waited for copies",
        )
