"""Features that a composition must refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class Sharder(Feature):
    """Owns SHARD."""

    seams: ClassVar = (Seam.SHARD,)

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class Wirer(Feature):
    """Owns WIRE."""

    seams: ClassVar = (Seam.WIRE,)

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class Optimizing(Feature):
    """Owns OPTIM."""

    seams: ClassVar = (Seam.OPTIM,)

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class Refuse(Feature):
    """Refuses every job in its check, which is the last."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        raise ConfigError("refused as planned")

    def apply(self, job: Job, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied though it refused")
