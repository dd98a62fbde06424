"""Features that a composition must refuse beside another owner, or in their own check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class ShardOwner(Feature):
    """A second owner of SHARD."""

    seams: ClassVar = (Seam.SHARD,)

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class WireOwner(Feature):
    """A second owner of WIRE."""

    seams: ClassVar = (Seam.WIRE,)

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class OptimOwner(Feature):
    """A second owner of OPTIM."""

    seams: ClassVar = (Seam.OPTIM,)

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class RefusesEveryJob(Feature):
    """Refuses every job in its check, which runs after all others."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        raise ConfigError("refused as planned")

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied though it refused")
