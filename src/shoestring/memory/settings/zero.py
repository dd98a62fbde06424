"""Settings of ZeRO: what each rank would hold alike is divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Reduction, Seam

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.memory.offload.late import LateSteps
    from shoestring.memory.zero.attached import Divided
    from shoestring.memory.zero.buckets import ShardedParameter
    from shoestring.memory.zero.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Zero(Feature):
    """Divide optimizer state and gradients among the ranks, and keep the parameters whole (ZeRO, Rajbhandari 2020)."""

    stage: Literal[1, 2] = 2
    """Stage of ZeRO. Both divide the optimizer state. Stage 2 also divides the gradients that accumulate over
    micro-batches, and exchanges them after each; stage 1 accumulates them whole and exchanges them once a step, which
    takes more memory and less network traffic. With one micro-batch a step they are the same."""
    master: Literal["fp32", "none"] = "fp32"
    """Data type of the copy that the optimizer steps where parameters have 16 bits. `none` steps the parameters
    themselves, which takes less memory and loses updates smaller than their last bit."""
    bucket_mb: float = 4.0
    """Size in MB of the buckets in which parameters below 0.25 MB are exchanged; larger parameters are exchanged one by
    one. Larger buckets need fewer collectives and overlap less with the backward pass."""
    in_flight_mb: float = 100.0
    """Upper bound of the gradients in MB that are exchanged while the backward pass continues. More hides slow links
    better and takes twice this much memory."""
    hosts: Literal["shard", "replicate", "leave"] = "shard"
    """Across hosts: `shard` as inside them; `replicate`, so that each host holds the whole state, divided among its
    ranks, and only gradients travel between hosts; or `leave` that mesh axis to another feature, such as a codec of
    `comm`."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)
    engine: ClassVar = "zero"

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    @property
    def divided_over(self) -> tuple[str, ...]:
        """The mesh axes whose ranks hold different shards."""
        return DATA if self.hosts == "shard" else (LOCAL,)

    def check(self, job: Job) -> None:
        for name in ("bucket_mb", "in_flight_mb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"`{self.name}.{name}` must be positive, got {getattr(self, name)}")
        world = job.world
        if self.hosts == "replicate" and world.ranks_over([HOSTS]) > 1 and world.ranks_over([LOCAL]) == 1:
            raise ConfigError(
                f'`{self.name}.hosts = "replicate"` divides nothing where a host has one rank',
                hint='use hosts = "shard", or parallel.ddp',
            )
        if job.engine == "ddp":
            raise ConfigError("the model is wrapped in DDP already", hint=f"remove DDP or {self.name}")
        if any(getattr(module, "sparse", False) is True for module in job.model.modules()):
            raise ConfigError(f"`{self.name}` divides no sparse gradients", hint="use nn.Embedding(sparse=False)")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.memory.zero.attached import divide

        divided = job.carry(self, lambda: divide(job, self))
        if seam is Seam.STEP and divided is not None:
            divided.check_optimizer(self.name)

    def steps_copies(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizer steps other tensors than the parameters even on one rank."""
        from shoestring.memory.zero.placement import is_half

        return self.master == "fp32" and any(is_half(parameter) for parameter in parameters)

    def placement(self, job: Job, parts: Sequence[ShardedParameter]) -> Placement:
        """Where what the optimizer steps lies."""
        from shoestring.memory.zero.placement import OnDevice

        return OnDevice(self.master == "fp32")

    def late_steps(self, divided: Divided) -> LateSteps | None:
        """What steps a part of the elements later than the others."""
        return None

    def explain(self, job: Job) -> str:
        ranks, hosts = job.world.ranks_over(self.divided_over), job.world.ranks_over([HOSTS])
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
            cost=f"{sent / 1e6:.3g} MB sent and {1e3 * exposed:.0f} ms of exposed communication a rank and step",
        )
