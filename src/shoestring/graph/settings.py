"""Settings of torch.compile and of split operators; importing this module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import LOCAL, Feature, Reduction, Seam, Table
from shoestring.figures import memory, percent, seconds
from shoestring.graph import names

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.core.world import World


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


@dataclass(frozen=True, kw_only=True)
class Split(Feature):
    """Split the operators of a training step over the ranks of a host, in the fastest way that a search predicts.

    Weights, samples and activations are whole or in shards, as the search chooses for each tensor. The step is traced
    once, from a batch of the sizes that all batches have, and each rank then runs its own program of operators and
    messages. The result is that of one process. `shoestring plan --explain` shows what the search finds.
    """

    cluster: str = ""
    """Path of the file with the measured speeds of this host's ranks and the links between them, as `shoestring probe
    --workers N` writes it. The search predicts from these speeds."""
    gib: float = 0.0
    """Memory of a rank in GiB for weights, gradients, optimizer state and saved activations. Less memory makes the
    search divide more tensors. 0 allows all memory of a rank's device that `cluster` states."""
    mesh: tuple[int, ...] = ()
    """Numbers of ranks along the axes of a mesh, such as `[2, 2]`: tensors can then be divided along several dimensions
    at once, which may fit where their sizes are no multiples of all ranks. Ranks with successive numbers lie along the
    last axis. Without a mesh, all ranks are one axis."""
    order: Literal["searched", "traced"] = "searched"
    """Order of operators and messages in a rank's program: `searched` lets messages travel while the rank computes, in
    tiles where that pays, and takes some seconds at the start; with `traced`, a rank begins each message when it needs
    the result, and computes nothing meanwhile."""

    seams: ClassVar = (Seam.SHARD,)

    @property
    def over(self) -> tuple[str, ...]:
        return (names.OPERATORS, *(f"{names.OPERATORS}_{axis}" for axis in range(2, len(self.mesh) + 1)))

    def arrange(self, world: World) -> World:
        if world.hosts > 1:
            raise ConfigError(
                f"`{self.name}` splits operators among the ranks of one host, and there are {world.hosts} hosts",
                hint="use [parallel.pipeline] or [parallel.ddp] across hosts",
            )
        ranks = world.ranks_over([LOCAL])
        if ranks == 1 and (not self.mesh or names.OPERATORS in world.axes):
            return world
        if self.mesh and (math.prod(self.mesh) != ranks or min(self.mesh) < 2):
            raise ConfigError(
                f"`{self.name}.mesh` has {_shape(self.mesh)} ranks, and a host has {ranks}",
                hint="each axis has at least two ranks, and their product is the number of ranks of a host",
            )
        world = world.split(LOCAL, names.OPERATORS, ranks)
        for place, axis in enumerate(self.over[1:], start=1):
            world = world.split(self.over[place - 1], axis, math.prod(self.mesh[place:]))
        return world

    def check(self, attachments: Attachments) -> None:
        from shoestring.graph.choosing import check

        check(attachments, self)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.graph.dividing import attach

        attach(attachments, self)

    def explain(self, attachments: Attachments) -> str:
        from shoestring.graph.choosing import chosen

        ranks = attachments.world.ranks_over(self.over)
        if ranks == 1:
            return "off: one rank"
        plan = chosen(attachments, self)
        if plan is None:
            return f"over {ranks} ranks; the plan is searched when the run starts"
        return (
            f"{plan.operators:,} operators over {_shape(self.mesh or (ranks,))} ranks, {plan.sharded} of "
            f"{plan.parameters} parameters in shards; {seconds(plan.seconds)} a step and {memory(int(plan.memory))} "
            "of a rank are predicted"
        )

    def reduction(self, trace: Trace) -> Reduction | None:
        facts, steps = trace.facts, max(trace.steps, 1)
        if names.WHOLE_FACT not in facts:
            return None
        waited = facts[names.WAITED_FACT] / trace.training_seconds if trace.training_seconds else 0.0
        return Reduction(
            unit="bytes of weights that a rank holds",
            used=facts[names.HELD_FACT],
            without=facts[names.WHOLE_FACT],
            measured=True,
            cost=f"a rank sent {memory(facts[names.SENT_FACT] / steps)} a step, and waited {percent(waited)} of it",
        )

    def report_items(self, trace: Trace) -> list[Table]:
        facts = trace.facts
        if not trace.steps or names.PREDICTED_FACT not in facts:
            return []
        took, sent = trace.training_seconds / trace.steps, facts[names.SENT_FACT] / trace.steps
        rows = (("seconds of a step", facts[names.PREDICTED_FACT], took),)
        note = (
            f"Predicted without overlap of messages and computation. A rank sends {memory(sent)} a step, in "
            f"{int(facts[names.MESSAGES_FACT])} messages for each micro-batch."
        )
        return [Table(title="Split operators", head=("", "predicted", "measured"), rows=rows, note=note)]


def _shape(mesh: Sequence[int]) -> str:
    return " × ".join(map(str, mesh))
