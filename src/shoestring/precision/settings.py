"""Settings of mixed precision; importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring import figures
from shoestring.core.errors import ConfigError, ConflictError, nearest
from shoestring.core.feature import Curve, Feature, Inexact, Reduction, Seam, Table
from shoestring.precision.fact_names import CHOSEN, CHOSEN_TITLE

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
    losses, and what follows from these. With `measure`, errors of gradients that are measured while training correct
    the choice. Held-out data is evaluated in 32 bits.
    """

    forward_propagation: bool = False
    """Narrow the operators that follow products as well, even if no other product follows: fewer bytes, and a larger
    error of gradients."""
    wide: tuple[str, ...] = ()
    """Names of ATen operators that stay in 32 bits, such as "silu" or "_softmax"."""
    fp8: bool = False
    """Multiply large matrices in 8 bits: e4m3 forward and e5m2 for gradients, with a scale for each tensor, computed in
    each step. Needs a GPU of compute capability 8.9 or later (Ada, Hopper). Faster where products dominate; the error
    of gradients is several times larger than in bf16."""
    measure: int = 0
    """Interval in steps between measurements of the error of gradients against 32 bits; 0 never measures. A measured
    step computes its last micro-batch about five times more, operator by operator, and tries other bits in one group of
    equal operators. Once all groups have been tried, those whose rounding adds the least error for the bytes that it
    spares are narrowed, as many as `error` allows, and the others are widened."""
    error: float = 1.0
    """Upper bound of the relative error of a step's gradients with `measure`. A larger bound narrows more operators."""
    error_relative_to: Literal["autocast", "gradients"] = "autocast"
    """Unit of `error`: the error that torch's autocast has on the same samples, or the norm of the gradients, so that
    0.02 is an error of 2%."""
    changes: int = 3
    """Largest number of times that measured errors change the bits of operators. Each change compiles the model anew;
    after the last one nothing is measured any more."""

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
        self._check_eight_bits(attachments)
        self._check_measuring(attachments)

    def _check_eight_bits(self, attachments: Attachments) -> None:
        if not self.fp8:
            return
        from shoestring.precision.eight_bits import PRODUCTS, lacks_eight_bits

        if self.dtype == "fp32":
            message = f"`{self.name}.fp8` needs a 16-bit type for what is not in 8 bits, and `dtype` is fp32"
            raise ConfigError(message, hint='write dtype = "bf16"')
        if {*PRODUCTS} <= {*self.wide}:
            raise ConfigError(
                f"`{self.name}.fp8` multiplies matrices in 8 bits, and `{self.name}.wide` keeps all of these products "
                "in 32 bits",
                hint=f"take {' and '.join(PRODUCTS)} out of `wide`, or remove `fp8`",
            )
        if why := lacks_eight_bits(attachments.world.device):
            raise ConfigError(f"`{self.name}.fp8`: {why}", hint=f"remove `{self.name}.fp8`")

    def _check_measuring(self, attachments: Attachments) -> None:
        for key, least in (("measure", 0), ("changes", 1)):
            if (value := getattr(self, key)) < least:
                raise ConfigError(f"`{self.name}.{key}` must be at least {least}, got {value}")
        if not 0 < self.error < float("inf"):
            hint = "1 allows the error of autocast; 0.02 with `error_relative_to` = gradients allows 2%"
            raise ConfigError(f"`{self.name}.error` must be a number above 0, got {self.error:g}", hint=hint)
        if not self.measure:
            return
        from shoestring.core.whole_batch import is_over_whole_batch

        message = f"`{self.name}.measure` computes a micro-batch by itself on each rank"
        hint = f"remove `{self.name}.measure`"
        if owner := next((one.name for one in attachments.features if one.divided == "parameters"), ""):
            raise ConfigError(f"{message}, and `{owner}` divides the parameters", hint=hint)
        if is_over_whole_batch(attachments):
            raise ConfigError(f"{message}, and the loss is over the whole batch", hint=hint)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.precision.graph_attached import narrow_graphs, scale_loss

        if self.dtype == "fp32":
            return
        if seam is Seam.GRAPH:
            narrow_graphs(attachments, self)
        elif self.dtype == "fp16":
            scale_loss(attachments)

    def explain(self, attachments: Attachments) -> str:
        text, facts = super().explain(attachments), attachments.trace.facts
        if self.dtype == "fp32" or not self.measure:
            return text
        if "gradient_error" not in facts:
            return f"{text}; errors of gradients are measured every {self.measure} steps"
        return (
            f"{text}; the error of gradients was {facts['gradient_error']:.2g} when it was last measured, "
            f"{facts['gradient_error_bound']:.2g} is allowed; the bits of operators changed "
            f"{facts.get('list_changes', 0):.0f} times"
        )

    def reduction(self, trace: Trace) -> Reduction | None:
        if "narrowed_elements" not in trace.facts:
            return None
        facts, fraction = trace.facts, trace.facts["narrowed_elements"]
        cost = f"{facts['narrowed_casts']:.0f} casts, for {facts['narrowed_operators']:.0f} operators in 16 bits"
        if facts.get("narrowed_products"):
            cost += f" ({facts['narrowed_products']:.0f} of them multiply 8 bits)"
        cost += ", in all compiled graphs"
        if steps := facts.get("measured_steps"):
            cost += f"; {figures.seconds(facts['measuring_seconds'])} for measuring errors in {steps:.0f} steps"
        return Reduction(
            unit="of the memory that the results of a step's operators would take in 32 bits",
            used=1 - fraction / 2,
            without=1.0,
            measured=True,
            cost=cost,
        )

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        if not self.measure or "gradient_error" not in trace.facts:
            return ()
        chosen = {name.removeprefix(CHOSEN): bits for name, bits in trace.facts.items() if name.startswith(CHOSEN)}
        table = Table(
            title=CHOSEN_TITLE,
            head=("operators", "bits"),
            rows=tuple(sorted(chosen.items())),
            note="A group is an operator with what it reads and what reads it; ' marks the backward pass. Groups that "
            "are not listed have the bits of the lists and passes.",
        )
        curve = Curve(title="Error of gradients", metrics={"gradient_error": "relative to 32 bits"})
        return (table, curve) if chosen else (curve,)


Graph.neutral = Graph(dtype="fp32")
