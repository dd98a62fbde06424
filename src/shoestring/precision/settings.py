"""Settings of mixed precision; importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.errors import ConfigError, ConflictError, nearest
from shoestring.core.feature import Feature, Inexact, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.core.world import World


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(Feature):
    """Base of the ways to compute in 16 bits."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type to compute in where 16 bits are accurate enough: `auto` takes bf16 where the device computes it fast,
    fp16 with a loss scaler on GPUs without bf16, and fp32 elsewhere."""

    @property
    def inexact(self) -> Inexact:
        return "" if self.dtype == "fp32" else "numbers"

    @property
    def scales_loss(self) -> bool:
        return self.dtype == "fp16"

    def resolve(self, world: World) -> Self:
        from shoestring.precision.autocast import choose

        return replace(self, dtype=choose(world.device)[0]) if self.dtype == "auto" else self

    def explain(self, attachments: Attachments) -> str:
        from shoestring.precision.autocast import choose

        best, why = choose(attachments.world.device)
        return f"{self.dtype}: {why}" if self.dtype == best else f"{self.dtype} as asked; auto would take {best}: {why}"


@dataclass(frozen=True, kw_only=True)
class Autocast(MixedPrecision):
    """Run the forward pass in a 16-bit type where torch's autocast considers that safe; weights keep their type."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.precision.autocast import cast

        cast(attachments, self.dtype)


Autocast.neutral = Autocast(dtype="fp32")


@dataclass(frozen=True, kw_only=True)
class Graph(MixedPrecision):
    """Compute in 16 bits what the whole graph of a training step allows, forward and backward; weights keep their type.

    Autocast decides for each operator alone. This feature traces the step with torch.compile and decides by the
    operators before and after: products are narrowed, and so is what lies between two of them, but for sums, powers and
    losses, and what follows from these. Held-out data is evaluated in 32 bits.
    """

    forward_propagation: bool = False
    """Narrow the operators that follow products as well, even if no other product follows: fewer bytes, and a larger
    error of gradients."""
    wide: tuple[str, ...] = ()
    """Names of ATen operators that stay in 32 bits, such as "silu" or "_softmax"."""

    seams: ClassVar = (Seam.MODEL, Seam.GRAPH)

    def check(self, attachments: Attachments) -> None:
        if any(isinstance(feature, Autocast) for feature in attachments.features):
            raise ConflictError(
                f"`{self.name}` and `precision.autocast` both choose the types of operators",
                hint="remove one of the two tables",
            )
        from shoestring.precision.lists import LISTS, list_of

        for operator in self.wide:
            if list_of(operator) is None:
                known = {name for operators in LISTS.values() for name in operators}
                raise ConfigError(f"`{self.name}.wide`: no operator `{operator}`", hint=nearest(operator, known))

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.precision.graph_attached import narrow_graphs, scale_loss

        if self.dtype == "fp32":
            return
        if seam is Seam.GRAPH:
            narrow_graphs(attachments, self)
        elif self.dtype == "fp16":
            scale_loss(attachments)

    def reduction(self, trace: Trace) -> Reduction | None:
        if "narrowed_elements" not in trace.facts:
            return None
        fraction = trace.facts["narrowed_elements"]
        return Reduction(
            unit="of the memory that the results of a step's operators would take in 32 bits",
            used=1 - fraction / 2,
            without=1.0,
            measured=True,
            cost=f"{trace.facts['narrowed_casts']:.0f} casts, for {trace.facts['narrowed_operators']:.0f} operators in "
            "16 bits, in all compiled graphs",
        )


Graph.neutral = Graph(dtype="fp32")
