"""Settings of data parallelism; importing this module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace

FIRST_BUCKET_MB = 1.05
"""Smallest bucket in MB with which torch.compile works: DDP's first bucket always has 2**20 bytes, and torch.compile
requires that no other bucket is smaller."""


@dataclass(frozen=True, kw_only=True)
class DDP(Feature):
    """Replicate the model on every rank and average gradients (torch DDP); the default with several ranks."""

    bucket_mb: float = 25.0
    """Size of the buckets of gradients in MB. Each bucket is all-reduced while the backward pass still runs."""
    find_unused: bool = False
    """Whether to search for parameters without a gradient in each step, which traverses the autograd graph. Needed if
    some steps do not use all parameters."""
    hosts: Literal["replicate", "leave"] = "replicate"
    """Parallelism across hosts: `replicate` averages gradients across hosts too, and `leave` lets another feature use
    the mesh axis of hosts."""

    seams: ClassVar = (Seam.SHARD,)
    averages_in_backward: ClassVar = True

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    def check(self, attachments: Attachments) -> None:
        if not 0 < self.bucket_mb < math.inf:
            raise ConfigError(f"`{self.name}.bucket_mb` must be positive, got {self.bucket_mb}")
        if attachments.wrapped:
            raise ConfigError("the model is already wrapped in DDP", hint=f"remove {self.name}")
        if self.bucket_mb < FIRST_BUCKET_MB and any(Seam.GRAPH in feature.seams for feature in attachments.features):
            raise ConfigError(
                f"`{self.name}.bucket_mb` of {self.bucket_mb:g} is too small for torch.compile",
                hint=f"set it to {FIRST_BUCKET_MB} or more",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.parallel.ddp import replicate

        replicate(attachments, self.over, self.bucket_mb, self.find_unused)

    def explain(self, attachments: Attachments) -> str:
        replicas, hosts = attachments.world.ranks_over(self.over), attachments.world.ranks_over([HOSTS])
        if replicas == 1:
            return "off: one rank" if attachments.world.ranks_over(DATA) == 1 else "off: one rank a host"
        return f"{replicas} replicas" + (f" in each of {hosts} hosts" if self.over == (LOCAL,) else "")


@dataclass(frozen=True, kw_only=True)
class FSDP(Feature):
    """Shard parameters, gradients and optimizer state over ranks (torch FSDP2, `fully_shard`)."""

    hosts: Literal["shard", "replicate", "leave"] = "shard"
    """Parallelism across hosts: `shard` shards over all ranks, `replicate` shards within each host and replicates
    across hosts (hybrid sharding), and `leave` lets another feature use the mesh axis of hosts."""
    reshard_after_forward: bool = True
    """Whether to free gathered parameters after the forward pass and gather them again for the backward pass. This
    lowers memory and costs one more all-gather per step."""

    seams: ClassVar = (Seam.SHARD,)
    divided: ClassVar = "parameters"

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    def check(self, attachments: Attachments) -> None:
        if attachments.wrapped:
            raise ConfigError("the model is already wrapped in DDP", hint=f"remove DDP or {self.name}")
        scalars = [name for name, parameter in attachments.module.named_parameters() if parameter.ndim == 0]
        if scalars and attachments.world.ranks_over(self.over) > 1:
            raise ConfigError(
                f"`{self.name}` shards parameters along their first dimension, and `{scalars[0]}` has no dimension",
                hint="give the parameter the shape (1,), or use parallel.DDP()",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.parallel.fsdp import shard

        shard(attachments, self.over, self.hosts == "replicate", self.reshard_after_forward)

    def explain(self, attachments: Attachments) -> str:
        hosts, ranks = attachments.world.ranks_over([HOSTS]), attachments.world.ranks_over([LOCAL])
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
