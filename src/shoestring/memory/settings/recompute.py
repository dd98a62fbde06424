"""Settings of activation checkpointing: activations are recomputed in the backward pass instead of held in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Reduction, Seam
from shoestring.planning.step import Situation, StepPlan

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace

_CALL = re.compile(r"\w+(:[1-9]\d*)?")


@dataclass(frozen=True, kw_only=True)
class Recompute(Feature):
    """Activation checkpointing (Chen et al., 2016): keep a block's input, rerun its forward in the backward pass."""

    every_nth: int = 1
    """Interval between recomputed blocks: 1 recomputes every block, which takes the least memory and the most time; 2
    recomputes every second block."""
    blocks: int = 0
    """Maximum number of blocks to recompute, from the first block selected by `every_nth`; 0 recomputes all selected
    blocks."""
    saved_operators: tuple[str, ...] = ()
    """Operators of torch whose results are held even in recomputed blocks (selective activation checkpointing), such as
    `["addmm", "mm"]`; `"addmm:2"` is the second call in a block. Choose operators that take long and return little
    data."""

    seams: ClassVar = (Seam.MODEL,)

    def check(self, attachments: Attachments) -> None:
        from shoestring.memory.recompute import operators
        from shoestring.models.blocks import repeated

        if self.every_nth < 1:
            raise ConfigError(f"`{self.name}.every_nth` must be at least 1, got {self.every_nth}")
        if self.blocks < 0:
            raise ConfigError(f"`{self.name}.blocks` must not be negative, got {self.blocks}")
        for call in self.saved_operators:
            if not _CALL.fullmatch(call):
                raise ConfigError(
                    f"`{self.name}.saved_operators` names no operator: {call!r}", hint='write "addmm", or "addmm:2"'
                )
            if (operator := call.partition(":")[0]) not in operators():
                close = get_close_matches(operator, operators(), n=1)
                hint = f"did you mean `{close[0]}`?" if close else "names are those of torch.ops.aten"
                raise ConfigError(f"`{self.name}.saved_operators` names no operator of torch: {operator!r}", hint=hint)
        blocks = -(-len(repeated(attachments.model)) // self.every_nth)
        if self.blocks > blocks > 0:
            raise ConfigError(
                f"`{self.name}.blocks` must be at most {blocks}, the number of the model's blocks, got {self.blocks}"
            )
        if not blocks:
            raise ConfigError(
                f"{self.name} finds no blocks in {type(attachments.model).__name__}",
                hint="put its layers in an nn.ModuleList",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.recompute import recompute

        recompute(attachments, self)

    @classmethod
    def alternatives(cls, situation: Situation) -> list[Recompute]:
        counts = sorted({-(-situation.blocks // 2), situation.blocks} - {0})
        return [cls(blocks=0 if count == situation.blocks else count) for count in counts]

    def plan(self, step: StepPlan) -> Recompute:
        blocks = range(0, len(step.model.blocks), self.every_nth)
        step.recomputed = frozenset(blocks[: self.blocks or None])
        return self

    def explain(self, attachments: Attachments) -> str:
        return f"holds the results of {', '.join(self.saved_operators)}" if self.saved_operators else ""

    def reduction(self, trace: Trace) -> Reduction | None:
        blocks, treated = trace.facts["blocks"], trace.facts["recomputed_blocks"]
        return Reduction(
            unit="blocks whose activations are held",
            used=blocks - treated,
            without=blocks,
            measured=False,
            cost=f"{treated:.0f} of {blocks:.0f} blocks run forward twice"
            + (f", but for {len(self.saved_operators)} operators" if self.saved_operators else ""),
        )
