"""Features for tests that `compose` must refuse: second owners of a seam, and a feature that refuses every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class ShardOwner(Feature):
    """A feature that owns the seam SHARD; must be refused beside another owner."""

    seams: ClassVar = (Seam.SHARD,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class WireOwner(Feature):
    """A feature that owns the seam WIRE; must be refused beside another owner."""

    seams: ClassVar = (Seam.WIRE,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class OptimOwner(Feature):
    """A feature that owns the seam OPTIM; must be refused beside another owner."""

    seams: ClassVar = (Seam.OPTIM,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied beside another owner")


@dataclass(frozen=True, kw_only=True)
class RefusesEveryJob(Feature):
    """A feature whose check refuses every job; the check runs after the checks of all other features."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        raise ConfigError("refused as planned")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        raise AssertionError(f"{self.name} was applied though it refused")
