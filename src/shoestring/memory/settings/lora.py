"""Settings of low-rank adapters, with which fine-tuning trains a fraction of a percent of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Feature, Inexact, Reduction, Seam

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class LoRA(Feature):
    """Low-rank adapters (LoRA, Hu et al., 2021; DoRA, Liu et al., 2024): train two thin matrices beside each linear
    layer and freeze the model itself, so that only the adapters have gradients and optimizer state."""

    layers: tuple[str, ...] = ()
    """Patterns of the names of the linear layers to adapt, such as `blocks.*.attention.*`; by default all linear layers
    of the blocks. Embeddings, the head and layers that choose experts are then left out, as are layers in a mixture of
    experts whose names PEFT takes for the names of experts. Experts that a model holds in one tensor get no
    adapters."""
    modules_to_train: tuple[str, ...] = ()
    """Patterns of the names of modules whose own weights are trained in addition to the adapters, such as `embed` or
    `lm_head` (`modules_to_save` of PEFT). Training the embeddings helps if the texts differ much from the texts that
    the model was trained on. Each weight of these modules needs a gradient and optimizer state of its size, and is not
    rounded. In a 16-bit model, trained weights have 16 bits as well, so small updates are lost to rounding; with
    `[memory.zero]`, the optimizer updates fp32 copies of trained weights."""
    rank: int = 16
    """Rank of the adapters: rows of one of the two matrices and columns of the other. A larger rank learns more and
    takes more memory."""
    alpha: float = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Probability with which an input of an adapter is zeroed in training, which helps on small data sets."""
    dora: bool = False
    """Train the norm of each row of the weight separately from its direction (DoRA), which is often closer to full
    fine-tuning at low ranks, and slower."""
    base_bits: Literal[0, 16, 8, 4] = 0
    """Bits of the frozen weights: 16 stores the model in bfloat16; 8 or 4 round the linear layers of the blocks to
    integers with a scale for every 32 weights (QLoRA), and leave other weights as they are; 0 leaves all weights as
    they are. Fewer bits take less memory; rounding costs some loss, and the weights are dequantised for each product,
    which costs time."""
    base_type: Literal["int", "nf4"] = "int"
    """Number format of 4-bit base weights: `int`, integers with a scale for every 32 weights (4.5 bits per weight); or
    `nf4`, QLoRA's NormalFloat with double quantisation (4.13 bits per weight), stored by bitsandbytes as in PEFT and
    transformers."""
    adapter: str = ""
    """Folder of an adapter in PEFT's format to train further; its rank, scale and layers are then used. By default,
    adapters are new, and do not change the model's output before training."""
    merge: bool = True
    """Write the model with the adapters merged into its weights at the end of the run; false writes the adapters alone,
    which are small."""
    seed: int = 0
    """Seed of the initial values of the adapters."""

    seams: ClassVar = (Seam.MODEL,)
    adds_parameters: ClassVar = True

    @property
    def inexact(self) -> Inexact:
        return "numbers" if self.dropout or self.base_bits == 16 else ""

    def check(self, attachments: Attachments) -> None:
        from shoestring.memory.adapters.layers import choose, trained_modules, unmatched
        from shoestring.models import adapter_folder, nf4

        for name, is_valid, rule in (
            ("rank", self.rank >= 1, "must be at least 1"),
            ("alpha", 0 < self.alpha < float("inf"), "must be a positive number"),
            ("dropout", 0 <= self.dropout < 1, "is a probability in [0, 1)"),
        ):
            if not is_valid:
                raise ConfigError(f"`{self.name}.{name}` {rule}, got {getattr(self, name)}")
        for name in ("layers", "modules_to_train"):
            if self.adapter and getattr(self, name):
                hint = f"remove `{self.name}.{name}`"
                raise ConfigError(f"the adapter in `{self.adapter}` determines its own layers", hint=hint)
        if self.adapter:
            adapter_folder.read(Path(self.adapter), attachments.module)
        if self.base_type == "nf4":
            if self.base_bits != 4:
                hint = f"set `{self.name}.base_bits` to 4"
                raise ConfigError(f"`{self.name}.base_type` nf4 has 4 bits, not {self.base_bits}", hint=hint)
            nf4.library()
        trained_modules(attachments.module, self.modules_to_train)
        choice = choose(attachments.module, self.layers, self.modules_to_train)
        if choice.adapted and (none := unmatched(attachments.module, self.layers)):
            hint = f"there are {choice.examples}"
            raise ConfigError(f"`{self.name}.layers`: `{none[0]}` matches no linear layer", hint=hint)
        if not choice.adapted and not self.adapter:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(choice.left.items())[:3])
            what = "can adapt none of the layers" if choice.left else "matches no linear layer"
            raise ConfigError(
                f"`{self.name}.layers` {what}"
                + (f": {reasons}" if reasons else f" of {type(attachments.module).__name__}"),
                hint=f"name layers by patterns; there are {choice.examples}",
            )
        for other in attachments.features:
            if other is not self and other.adds_parameters:
                raise ConflictError(f"`{self.name}` freezes the model, and `{other.name}` adds parameters to it")

    @property
    def places_model(self) -> bool:
        return self.base_bits > 0

    @property
    def exports_model(self) -> bool:
        return self.merge

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.adapters.attached import attach
        from shoestring.memory.settings.zero import Zero

        attach(
            attachments,
            self,
            copies=any(isinstance(feature, Zero) and feature.master == "fp32" for feature in attachments.features),
        )

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.memory.adapters.leaving import merged

        return merged(weights, states[self.name])

    def write_beside(self, attachments: Attachments, base: str) -> Callable[[Path], None]:
        from shoestring.memory.adapters.leaving import gather_adapters

        return gather_adapters(attachments, self.name, base, self.dropout)

    def explain(self, attachments: Attachments) -> str:
        from shoestring.memory.adapters.layers import sizes

        if self.adapter:
            return f"trains the adapter in `{self.adapter}` further"
        facts = attachments.trace.facts
        if "adapted_layers" not in facts:  # `shoestring check` attaches no adapters
            modules, bits = self.modules_to_train, self.base_bits
            facts = sizes(attachments.module, self.layers, self.rank, dora=self.dora, modules=modules, bits=bits)
        some = f", {facts['rounded_parameters']:,.0f} of them" if self.base_bits in (8, 4) else ""
        base = f"{some} of {self.base_bits} bits" if self.base_bits else ""
        base += " in NF4" if self.base_type == "nf4" else ""
        return (
            f"{'DoRA' if self.dora else 'LoRA'} of rank {self.rank} in {facts['adapted_layers']:,.0f} linear layers: "
            f"{facts['adapter_parameters']:,.0f} parameters are trained"
            + (f", those of {', '.join(self.modules_to_train)} among them," if self.modules_to_train else "")
            + f" beside {facts['frozen_parameters']:,.0f} frozen ones{base}"
        )

    def reduction(self, trace: Trace) -> Reduction | None:
        trained, frozen = trace.facts["adapter_parameters"], trace.facts["frozen_parameters"]
        return Reduction(
            unit="parameters with gradients and optimizer state",
            used=trained,
            without=frozen,
            measured=False,
            cost="the frozen layers can only change by matrices of low rank",
        )
