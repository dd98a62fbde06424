"""Keeping the models of several ranks equal: replication and sharding by torch's own engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

__all__ = ["DDP", "FSDP"]


@dataclass(frozen=True, kw_only=True)
class DDP(Feature):
    """Replicate the model on every rank and average gradients (torch DDP); the default with several ranks."""

    bucket_mb: float = 25.0
    """Size in MB of the buckets that are all-reduced while the backward pass still computes."""
    find_unused: bool = False
    """Search for parameters without a gradient in each step; needed where the model does not use all of them in every
    step, and costs a traversal of the graph."""
    hosts: Literal["replicate", "leave"] = "replicate"
    """Across hosts: `replicate` averages gradients there too, `leave` leaves that mesh axis to another feature."""

    seams: ClassVar = (Seam.SHARD,)
    engine: ClassVar = "ddp"

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    def check(self, job: Job) -> None:
        if not 0 < self.bucket_mb < math.inf:
            raise ConfigError(f"`{self.name}.bucket_mb` must be positive, got {self.bucket_mb}")
        if job.engine == "ddp" and job.model is not job.module:
            raise ConfigError("the model is wrapped in DDP already", hint=f"remove {self.name}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.parallel.ddp import replicate

        replicate(job, self.over, self.bucket_mb, self.find_unused)

    def explain(self, job: Job) -> str:
        replicas, hosts = job.world.ranks_over(self.over), job.world.ranks_over([HOSTS])
        if replicas == 1:
            return "off: one rank" if job.world.ranks_over(DATA) == 1 else "off: one rank a host"
        return f"{replicas} replicas" + (f" in each of {hosts} hosts" if self.over == (LOCAL,) else "")


@dataclass(frozen=True, kw_only=True)
class FSDP(Feature):
    """Shard parameters, gradients and optimizer state over ranks (torch FSDP2, `fully_shard`)."""

    hosts: Literal["shard", "replicate", "leave"] = "shard"
    """Across hosts: `shard` as inside them, `replicate` the shards (hybrid), or `leave` that mesh axis to another
    feature."""
    reshard_after_forward: bool = True
    """Free gathered parameters between the forward and the backward pass: less memory, one more all-gather a step."""

    seams: ClassVar = (Seam.SHARD,)
    engine: ClassVar = "fsdp"

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    def check(self, job: Job) -> None:
        if job.engine == "ddp":
            raise ConfigError("the model is wrapped in DDP already", hint=f"remove DDP or {self.name}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.parallel.fsdp import shard

        shard(job, self.over, self.hosts == "replicate", self.reshard_after_forward)

    def explain(self, job: Job) -> str:
        hosts, ranks = job.world.ranks_over([HOSTS]), job.world.ranks_over([LOCAL])
        if hosts * ranks == 1:
            return "off: one rank"
        if self.hosts == "shard":
            return f"sharded over {hosts * ranks} ranks"
        return f"sharded over the {ranks} ranks of a host, {self.hosts}d across {hosts} hosts"

    def reduction(self, trace: Trace) -> Reduction | None:
        shards, whole = trace.facts.get("shards", 1.0), 4 * trace.gradient_bytes / 2**30
        if shards == 1:
            return None
        return Reduction(
            unit="GiB of parameters, gradients and optimizer state a rank",
            used=whole / shards,
            without=whole,
            measured=False,
            cost="gathers parameters twice a step" if self.reshard_after_forward else "gathers parameters once a step",
        )
