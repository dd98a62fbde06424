"""Settings of ZeRO: optimizer state and gradients are divided among the ranks instead of replicated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Reduction, Seam
from shoestring.planning.step import GradientExchange, Situation, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.memory.offload.late import LateSteps
    from shoestring.memory.zero.attached import Divided
    from shoestring.memory.zero.buckets import ShardedParameter
    from shoestring.memory.zero.placement import Placement


_ALONE = 2**18
"""Minimum size in bytes of a parameter that is exchanged by itself; see `memory.zero.buckets`."""


@dataclass(frozen=True, kw_only=True)
class Zero(Feature):
    """Divide optimizer state and gradients among the ranks, and keep the parameters whole (ZeRO, Rajbhandari 2020)."""

    stage: Literal[1, 2] = 2
    """Stage of ZeRO. Stages 1 and 2 divide the optimizer state. Stage 2 also divides the gradients that accumulate over
    micro-batches, and exchanges gradients after every micro-batch; stage 1 accumulates whole gradients and exchanges
    them once per step, which takes more memory and less network traffic. With one micro-batch per step, the stages are
    the same."""
    master: Literal["fp32", "none"] = "fp32"
    """Data type of the copies of 16-bit parameters that the optimizer updates. With `none`, the optimizer updates the
    16-bit parameters themselves, which takes less memory and loses updates smaller than a parameter's last bit."""
    bucket_mb: float = 4.0
    """Size in MB of the buckets in which parameters below 0.25 MB are exchanged; larger parameters are exchanged one by
    one. Larger buckets need fewer collectives and overlap less with the backward pass."""
    in_flight_mb: float = 100.0
    """Maximum size in MB of gradients that are being exchanged while the backward pass continues. A larger size
    overlaps more communication on slow links, and takes twice its size in memory."""
    hosts: Literal["shard", "replicate", "leave"] = "shard"
    """Division of the state across hosts: `shard` divides it among all ranks of all hosts; with `replicate`, each host
    holds the whole state, divided among its ranks, and only gradients are sent between hosts; `leave` leaves this mesh
    axis to another feature, such as a codec of `comm`."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)
    divided: ClassVar = "optimizer"

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    @property
    def divided_over(self) -> tuple[str, ...]:
        """The mesh axes along which ranks hold different shards."""
        return DATA if self.hosts == "shard" else (LOCAL,)

    def check(self, attachments: Attachments) -> None:
        for name in ("bucket_mb", "in_flight_mb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"`{self.name}.{name}` must be positive, got {getattr(self, name)}")
        world = attachments.world
        if self.hosts == "replicate" and world.ranks_over([HOSTS]) > 1 and world.ranks_over([LOCAL]) == 1:
            raise ConfigError(
                f'`{self.name}.hosts = "replicate"` divides nothing if each host has one rank',
                hint='use hosts = "shard", or parallel.ddp',
            )
        if attachments.wrapped:
            raise ConfigError("the model is wrapped in DDP already", hint=f"remove DDP or {self.name}")
        if any(getattr(module, "sparse", False) is True for module in attachments.model.modules()):
            raise ConfigError(f"`{self.name}` cannot divide sparse gradients", hint="use nn.Embedding(sparse=False)")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.zero.attached import divide

        divided = attachments.carry(self, lambda: divide(attachments, self))
        if seam is Seam.STEP and divided is not None:
            divided.check_optimizer(self.name)

    @classmethod
    def alternatives(cls, situation: Situation) -> list[Zero]:
        whole, inside = (
            [cls(stage=stage) for stage in (1, 2)],
            [cls(stage=stage, hosts="replicate") for stage in (1, 2)],
        )
        return [*whole, *(inside if situation.two_levels else [])]

    def plan(self, step: StepPlan) -> Zero:
        ranks = step.world.ranks_over(self.divided_over)
        every = self.stage == 2
        if ranks > 1:
            kind = "all-to-all" if step.device == "cpu" else "reduce-scatter"  # with Gloo, an all-to-all sends less
            step.average(GradientExchange(kind, self.divided_over, _ALONE, every=every))
            step.regathered = self.divided_over
            step.divided |= {"optimizer": ranks, "gradients": ranks if every else 1}
        if self.hosts == "replicate":
            step.average(GradientExchange("all-reduce", (HOSTS,), _ALONE, every=every, shard=ranks))
        return self

    def steps_copies(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizer updates copies of the parameters even if there is only one rank."""
        from shoestring.memory.zero.placement import is_half

        return self.master == "fp32" and any(is_half(parameter) for parameter in parameters)

    def placement(self, attachments: Attachments, parts: Sequence[ShardedParameter]) -> Placement:
        """Create the storage for the shards that the optimizer updates."""
        from shoestring.memory.zero.placement import OnDevice

        return OnDevice(self.master == "fp32")

    def late_steps(self, divided: Divided) -> LateSteps | None:
        """Create the `LateSteps` that update some elements one step late; None if all are updated in time."""
        return None

    def explain(self, attachments: Attachments) -> str:
        ranks, hosts = attachments.world.ranks_over(self.divided_over), attachments.world.ranks_over([HOSTS])
        if ranks == 1:
            return "one rank: nothing is divided"
        return f"divided among {ranks} ranks" + (f" in each of {hosts} hosts" if self.divided_over == (LOCAL,) else "")

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if "zero_held" not in facts:
            return None
        exposed, sent = (facts[name] / facts["zero_steps"] for name in ("zero_exposed", "zero_bytes"))
        return Reduction(
            unit="GiB of parameters, gradients and optimizer state a rank",
            used=facts["zero_held"] / 2**30,
            without=facts["zero_without"] / 2**30,
            measured=True,
            cost=f"{figures.size(sent)} sent and {figures.seconds(exposed)} of exposed communication a rank and step",
        )
