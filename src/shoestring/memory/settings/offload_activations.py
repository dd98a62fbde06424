"""Settings of offloading activations: what the backward pass needs lies in host memory meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Feature):
    """Hold the activations of blocks in host memory (activation offloading; vDNN, Rhu et al., 2016).

    They are copied down while the next block runs, and up while the backward pass of the next block runs. The run
    computes the same bits. Where blocks are recomputed, only their inputs are left to offload.
    """

    blocks: int = 0
    """Number of blocks of the model whose activations are offloaded, from the first; 0 is all but the last, whose
    activations are needed again at once. More blocks take less memory of the device and more bandwidth to the host."""
    min_mb: float = 1.0
    """Size in MB below which a tensor stays on the device. A lower bound offloads more, in more and smaller copies."""

    seams: ClassVar = (Seam.MODEL,)

    def number_of(self, blocks: Sized) -> int:
        """How many of a model's blocks have their activations offloaded."""
        return self.blocks or len(blocks) - 1

    def check(self, job: Job) -> None:
        from shoestring.models.blocks import repeated

        if not 0 <= self.min_mb < math.inf:
            raise ConfigError(f"`{self.name}.min_mb` must not be negative, got {self.min_mb}")
        blocks = repeated(job.model)
        if len(blocks) < 2:
            raise ConfigError(
                f"{self.name} finds {len(blocks)} blocks in {type(job.model).__name__}, and needs at least 2",
                hint="put its layers in an nn.ModuleList",
            )
        if not 0 <= self.blocks < len(blocks):
            raise ConfigError(
                f"`{self.name}.blocks` must be from 0 to {len(blocks) - 1}, got {self.blocks}",
                hint=f"the model has {len(blocks)} blocks, and the last one's activations are needed again at once",
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.memory.offload.activations import OffloadedBlocks

        OffloadedBlocks(job, self)

    def explain(self, job: Job) -> str:
        return "" if job.world.device.type != "cpu" else "on a CPU, host memory is all there is: nothing is gained"

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if "activations_offloaded" not in facts:
            return None
        host, copied = facts["activations_offloaded"] / 2**30, facts["activations_copied"] / 1e6
        return Reduction(
            unit="GiB of the offloaded blocks' activations on the device of a rank",
            used=facts["activations_on_device"] / 2**30,
            without=host,
            measured=True,
            cost=f"{host:.3g} GiB of host memory; {copied:.3g} MB copied in a forward and backward pass",
        )
