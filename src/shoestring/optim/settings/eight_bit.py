"""AdamW with running averages of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Seam
from shoestring.optim.settings.standard import AdamW

if TYPE_CHECKING:
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamW):
    """AdamW whose two running averages take 8 bits an element instead of 32 (Dettmers et al., 2022), rounded in blocks
    of 256; those of small tensors keep 32. Optimizer state takes a quarter of the memory, and a step some more time."""

    def check(self, job: Job) -> None:
        AdamW.check(self, job)
        if job.engine == "fsdp":
            raise ConfigError(f"`{self.name}` rounds whole tensors, and FSDP2 shards them", hint="use optim.adamw")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.eight_bit import build

        job.build_with(build(job, self))
