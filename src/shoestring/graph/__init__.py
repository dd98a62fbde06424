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
    """torch.compile the model; the first steps take long, later ones less."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """`inductor` fuses kernels and needs a C++ compiler (CPU) or Triton (GPU); the others are for debugging."""

    seams: ClassVar = (Seam.GRAPH,)

    def apply(self, job: Job, seam: Seam) -> None:
        job.compile_with(self.backend)

    def explain(self, job: Job) -> str:
        return f"by {self.backend}; the first steps compile"
