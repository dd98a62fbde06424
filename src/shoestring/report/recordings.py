"""Features that record some steps of a run into a file and a page in its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class RecordsSteps(Feature):
    """The settings of a recording; what it records changes neither losses nor weights."""

    after: int = 0
    """Number of steps before the first one that is recorded."""
    steps: int = 0
    """Number of steps to record; 0 records all until training ends."""
    folder: str = "."
    """Folder for the file and the page; in a run it lies in the run's folder."""

    seams: ClassVar = (Seam.STEP,)

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, job: Job) -> None:
        for name in ("after", "steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{self.name}.{name}` must not be negative, got {getattr(self, name)}")
        if 0 < job.progress.total <= self.after:
            said = f"`{self.name}.after` is {self.after}, and the run ends after {job.progress.total} steps"
            raise ConfigError(said, hint=f"set it to {job.progress.total - 1} or less")

    def explain(self, job: Job) -> str:
        last = f"to {self.after + self.steps}" if self.steps else "to the last one"
        return f"steps {self.after + 1} {last}; losses and weights are the same bits with it"
