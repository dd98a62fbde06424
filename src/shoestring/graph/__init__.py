"""Whole graphs instead of single operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job

__all__ = ["Compile"]


@dataclass(frozen=True, kw_only=True)
class Compile(Feature):
    """Compile the model with torch.compile: the first steps take long, later ones are faster."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile: `inductor` fuses kernels and needs a C++ compiler (CPU) or Triton (GPU); the others are
    for debugging."""

    seams: ClassVar = (Seam.GRAPH,)

    def apply(self, job: Job, seam: Seam) -> None:
        job.compile_with(self.backend)

    def explain(self, job: Job) -> str:
        if type(job.model).__module__.startswith("torch.nn."):  # torch skips the code of torch.nn at the top
            return f"nothing: torch does not compile a top-level nn.{type(job.model).__name__}; wrap it in a module"
        return f"by {self.backend}; the first steps compile"
