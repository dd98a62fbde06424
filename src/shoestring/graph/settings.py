"""Settings of torch.compile; importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class Compile(Feature):
    """Compile the model with torch.compile: the first steps take long, later ones are faster."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile: `inductor` fuses kernels and needs a C++ compiler (CPU) or Triton (GPU); the others are
    for debugging."""

    seams: ClassVar = (Seam.GRAPH,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.compile_with(self.backend)

    def explain(self, attachments: Attachments) -> str:
        if type(attachments.model).__module__.startswith("torch.nn."):  # torch.compile skips torch.nn's own code
            kind = type(attachments.model).__name__
            return f"nothing: torch does not compile a top-level nn.{kind}; wrap it in a module"
        return f"by {self.backend}; the first steps compile"
