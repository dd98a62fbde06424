"""Settings of activation offloading: tensors saved for the backward pass are held in host memory until needed."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Reduction, Seam
from shoestring.figures import memory

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Feature):
    """Hold the activations of blocks in host memory (activation offloading; vDNN, Rhu et al., 2016).

    Activations are copied to the host while the next block runs, and back to the device while the backward pass of the
    next block runs. The results of the run stay bit-identical. If blocks are also recomputed, only the blocks' inputs
    are offloaded.
    """

    blocks: int = 0
    """Number of blocks whose activations are offloaded, from the model's first block; 0 offloads all blocks except the
    last, whose activations are needed again immediately. More blocks need less device memory and more bandwidth to the
    host."""
    min_mb: float = 1.0
    """Minimum size in MB of a tensor that is offloaded. A lower minimum offloads more memory, in more and smaller
    copies."""

    seams: ClassVar = (Seam.MODEL,)

    def number_of(self, blocks: Sized) -> int:
        """Number of a model's blocks whose activations are offloaded."""
        return self.blocks or len(blocks) - 1

    def check(self, attachments: Attachments) -> None:
        from shoestring.models.blocks import repeated

        if not 0 <= self.min_mb < math.inf:
            raise ConfigError(f"`{self.name}.min_mb` must not be negative, got {self.min_mb}")
        blocks = repeated(attachments.model)
        if len(blocks) < 2:
            raise ConfigError(
                f"{self.name} finds {len(blocks)} blocks in {type(attachments.model).__name__}, and needs at least 2",
                hint="put its layers in an nn.ModuleList",
            )
        if not 0 <= self.blocks < len(blocks):
            raise ConfigError(
                f"`{self.name}.blocks` must be from 0 to {len(blocks) - 1}, got {self.blocks}",
                hint=f"the model has {len(blocks)} blocks, and the last block's activations are needed again at once",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.offload.activations import OffloadedBlocks

        OffloadedBlocks(attachments, self)

    def explain(self, attachments: Attachments) -> str:
        return (
            "" if attachments.world.device.type != "cpu" else "on a CPU, host memory is all there is: nothing is gained"
        )

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if "activations_offloaded" not in facts:
            return None
        host, copied = facts["activations_offloaded"], facts["activations_copied"]
        return Reduction(
            unit="GiB of the offloaded blocks' activations on the device of a rank",
            used=facts["activations_on_device"] / 2**30,
            without=host,
            measured=True,
            cost=f"{memory(host)} of host memory; {memory(copied)} copied in a forward and backward pass",
        )
