"""Activation checkpointing: blocks whose activations are computed again instead of held."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

_CALL = re.compile(r"\w+(:[1-9]\d*)?")


@dataclass(frozen=True, kw_only=True)
class Recompute(Feature):
    """Activation checkpointing (Chen et al., 2016): keep a block's input, run its forward pass again in backward."""

    every: int = 1
    """Interval between recomputed blocks of the model: 1 recomputes every block, which takes the least memory and the
    most time; 2 recomputes every second one."""
    blocks: int = 0
    """Number of blocks to recompute, from the first of those that `every` names; 0 is all of them."""
    keep: tuple[str, ...] = ()
    """Operators of torch whose results are held also in recomputed blocks (selective activation checkpointing), such as
    `["addmm", "mm"]`; `"addmm:2"` is the second call in a block. What takes long and returns little is worth it."""

    seams: ClassVar = (Seam.MODEL,)

    def check(self, job: Job) -> None:
        from shoestring.memory.recompute import operators
        from shoestring.models.blocks import repeated

        if self.every < 1:
            raise ConfigError(f"`{self.name}.every` must be at least 1, got {self.every}")
        if self.blocks < 0:
            raise ConfigError(f"`{self.name}.blocks` must not be negative, got {self.blocks}")
        for call in self.keep:
            if not _CALL.fullmatch(call):
                raise ConfigError(f"`{self.name}.keep` names no operator: {call!r}", hint='write "addmm", or "addmm:2"')
            if (operator := call.partition(":")[0]) not in operators():
                close = get_close_matches(operator, operators(), n=1)
                hint = f"did you mean `{close[0]}`?" if close else "names are those of torch.ops.aten"
                raise ConfigError(f"`{self.name}.keep` names no operator of torch: {operator!r}", hint=hint)
        blocks = -(-len(repeated(job.model)) // self.every)
        if self.blocks > blocks > 0:
            raise ConfigError(f"`{self.name}.blocks` must be at most {blocks}, as many as there are, got {self.blocks}")
        if not blocks:
            raise ConfigError(
                f"{self.name} finds no blocks in {type(job.model).__name__}", hint="put its layers in an nn.ModuleList"
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.memory.recompute import recompute

        recompute(job, self)

    def explain(self, job: Job) -> str:
        return f"holds the results of {', '.join(self.keep)}" if self.keep else ""

    def reduction(self, trace: Trace) -> Reduction | None:
        blocks, treated = trace.facts["blocks"], trace.facts["recomputed_blocks"]
        return Reduction(
            unit="blocks whose activations are held",
            used=blocks - treated,
            without=blocks,
            measured=False,
            cost=f"{treated:.0f} of {blocks:.0f} blocks run forward twice"
            + (f", but for {len(self.keep)} operators" if self.keep else ""),
        )
