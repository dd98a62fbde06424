"""Settings of the features that record some steps of a run; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class RecordsSteps(Feature):
    """The settings of a recording; recording changes neither losses nor weights."""

    after: int = 0
    """Number of steps before the first recorded step."""
    steps: int = 0
    """Number of steps to record; 0 records all steps until training ends."""
    folder: str = "."
    """Folder for the file and the page, relative to the run's folder or, without one, to the working directory."""

    seams: ClassVar = (Seam.STEP,)

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, attachments: Attachments) -> None:
        for name in ("after", "steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{self.name}.{name}` must not be negative, got {getattr(self, name)}")
        if 0 < attachments.progress.total <= self.after:
            message = f"`{self.name}.after` is {self.after}, and the run ends after {attachments.progress.total} steps"
            raise ConfigError(message, hint=f"set it to {attachments.progress.total - 1} or less")

    def explain(self, attachments: Attachments) -> str:
        last = f"to {self.after + self.steps}" if self.steps else "to the last one"
        return f"steps {self.after + 1} {last}; losses and weights are the same bits with it"
