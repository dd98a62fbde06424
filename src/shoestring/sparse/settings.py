"""Settings of training with 2:4 sparse weights. This module does not import torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Curve, Feature, Inexact, Reduction, Seam, Table

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.sparse.attached import SparseMethod
    from shoestring.sparse.layers import LinearLayers

MaskName = Literal["rows", "transposable", "greedy", "torch_default"]


@dataclass(frozen=True, kw_only=True)
class Sparsity(Feature):
    """Base class of the settings of all methods that train with 2:4 sparse weights."""

    layers: tuple[str, ...] = ()
    """Name patterns of the linear layers to make sparse, such as `blocks.*.mlp.*`; by default the
    feed-forward layers."""
    mvue: bool = False
    """Make the gradients of outputs 2:4 as well, by unbiased random draws, so that weight gradients are computed by
    sparse products too; adds noise to every weight gradient."""
    seed: int = 0
    """Seed of the random draws of `mvue`."""

    seams: ClassVar = (Seam.MODEL, Seam.STEP)

    @property
    def inexact(self) -> Inexact:
        return "numbers" if self.mvue else ""

    @property
    def rows_too(self) -> bool:
        """Whether masks are also 2:4 along the weight's columns, so that the transposed weight is sparse too."""
        return False

    @abstractmethod
    def method(self, attachments: Attachments) -> SparseMethod:
        """Build the algorithm that computes the sparse weights."""

    @property
    def products(self) -> int:
        """Number of a linear layer's products that are sparse, of three in a step: output, input gradient and
        weight gradient."""
        return 1 + self.rows_too + self.mvue

    def check(self, attachments: Attachments) -> None:
        choice = self.choose(attachments)
        if not choice.sparse:
            what = "matches no linear layer" if not choice.dense else "leaves every layer dense"
            reasons = "; ".join(f"{name}: {why}" for name, why in list(choice.dense.items())[:3])
            raise ConfigError(
                f"`{self.name}` {what}" + (f": {reasons}" if reasons else f" of {type(attachments.module).__name__}"),
                hint=f"name layers by patterns in `{self.name}.layers`; there are {choice.examples}",
            )
        for other in attachments.features:
            if other.adds_parameters and other is not self and not isinstance(other, Sparsity):
                raise ConflictError(
                    f"`{self.name}` trains the model's weights, and `{other.name}` freezes them",
                    hint=f"remove the table [{self.name}] or [{other.name}]",
                )
            layers = other.choose(attachments).sparse if isinstance(other, Sparsity) and other is not self else {}
            if shared := [name for name in layers if name in choice.sparse]:
                raise ConflictError(
                    f"`{self.name}` and `{other.name}` both make `{shared[0]}` sparse",
                    hint="give each its own `layers`",
                )

    def choose(self, attachments: Attachments) -> LinearLayers:
        """The layers of the job's model that become sparse, and why other selected layers do not."""
        from shoestring.sparse.layers import choose, leave_frozen

        return leave_frozen(choose(attachments.module, self.layers, rows_too=self.rows_too))

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.sparse.attached import install

        install(attachments, self, seam)

    def explain(self, attachments: Attachments) -> str:
        from shoestring.sparse.attached import SparseLayers
        from shoestring.sparse.report import explained

        # After attaching, layers are patched, so that a second choice would find that they cannot be sparse.
        attached = attachments.kept[self.name].state if self.name in attachments.kept else None
        choice = attached.choice if isinstance(attached, SparseLayers) else self.choose(attachments)
        return explained(choice, self.products, attachments.world.device)

    def reduction(self, trace: Trace) -> Reduction | None:
        from shoestring.sparse.report import reduction

        return reduction(trace, self.products)

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        from shoestring.sparse.report import report_items

        return report_items(trace)


@dataclass(frozen=True, kw_only=True)
class SSTE(Sparsity):
    """S-STE (Hu et al., 2024): in each group of four weights, all magnitudes shrink by the third largest magnitude,
    down to zero, so that sparse weights are continuous functions of the dense weights. The dense weights are trained
    with straight-through gradients."""

    simulate_fp8: bool = False
    """Round the inputs of every product of a sparse layer to 8 bits (e4m3 forward, e5m2 for gradients). The setting
    simulates the effect of FP8 on the loss, and makes no step faster."""

    @property
    def inexact(self) -> Inexact:
        return "numbers" if self.simulate_fp8 or self.mvue else ""

    def method(self, attachments: Attachments) -> SparseMethod:
        from shoestring.sparse.soft import Shrunk

        return Shrunk(attachments, self)

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.sparse.soft import shrink

        scales = states[self.name]["scales"]
        return weights | {f"{name}.weight": shrink(weights[f"{name}.weight"]) * scales[name] for name in scales}


@dataclass(frozen=True, kw_only=True)
class Masked(Sparsity):
    """Base class of the methods with masks: the dense weights are trained with the gradients of the masked weights."""

    # The properties below hold the values for methods that have no setting of the same name. Subclasses replace some of
    # these properties by fields.
    @property
    def mask(self) -> MaskName:
        return "rows"

    @property
    def norm(self) -> Literal["l1", "l2"]:
        return "l1"

    @property
    def refresh(self) -> int:
        return 1

    @property
    def masked_decay(self) -> float:
        return 0.0

    @property
    def decay_below(self) -> float:
        """Exclusive upper bound of `masked_decay`."""
        return 1.0

    @property
    def calibrate(self) -> float:
        return 0.0

    @property
    def tail(self) -> float:
        return 0.0

    def method(self, attachments: Attachments) -> SparseMethod:
        from shoestring.sparse.masked import Masks

        return Masks(attachments, self)

    def check(self, attachments: Attachments) -> None:
        Sparsity.check(self, attachments)
        if self.refresh < 1:
            raise ConfigError(f"`{self.name}.refresh` must be at least 1 step, got {self.refresh}")
        if not 0 <= self.masked_decay < self.decay_below:
            raise ConfigError(
                f"`{self.name}.masked_decay` must lie in [0, {self.decay_below:g}), got {self.masked_decay}"
            )
        for name, share in (("tail", self.tail), ("calibrate", self.calibrate)):
            if not 0 <= share < 1:
                raise ConfigError(f"`{self.name}.{name}` is a share of the steps in [0, 1), got {share}")

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.sparse.masked import pruned

        masks = states[self.name]["masks"]
        return weights | {f"{name}.weight": pruned(weights[f"{name}.weight"], masks[name]) for name in masks}


@dataclass(frozen=True, kw_only=True)
class STE(Masked):
    """Train with a 2:4 mask and straight-through gradients to all weights (the simplest baseline)."""

    mask: MaskName = "rows"
    """Kind of mask: `rows` keeps the two largest of every four weights in a row; `transposable` is the best mask that
    is 2:4 in rows and columns; `greedy` is torch's greedy search by magnitude; `torch_default` is torch's default
    search by signed value (only for comparison)."""
    refresh: int = 1
    """Optimizer steps between two refreshes of the masks; a larger number takes less time, but masks lag further
    behind the weights."""

    @property
    def rows_too(self) -> bool:
        return self.mask != "rows"


@dataclass(frozen=True, kw_only=True)
class SRSTE(Masked):
    """SR-STE (Zhou et al., 2021): train with a 2:4 mask of rows, and decay the masked weights."""

    masked_decay: float = 2e-4
    """Decay factor: this multiple of the masked weights is added to their gradients; with a larger factor masks change
    less."""


@dataclass(frozen=True, kw_only=True)
class STEP(Masked):
    """STEP (Lu et al., 2023): train dense until Adam's second moments are stable, then freeze the second moments and
    train with 2:4 masks of rows (a baseline). With SGD, which has no second moments, masks begin after `earliest`."""

    earliest: float = 0.1
    """Earliest point at which masks may begin, as a share of the run's steps."""
    latest: float = 0.5
    """Latest point at which masks begin, as a share of the run's steps. Masks begin earlier once the second moments are
    stable, that is, once their mean change per step, averaged over 1 / (1 - beta2) steps, is below the optimizer's
    epsilon."""

    def check(self, attachments: Attachments) -> None:
        Masked.check(self, attachments)
        if not 0 <= self.earliest <= self.latest < 1:
            raise ConfigError(
                f"`{self.name}.earliest` and `latest` are shares with 0 <= earliest <= latest < 1,"
                f" got {self.earliest} and {self.latest}"
            )
        names = [feature.name for feature in attachments.features if Seam.OPTIM in feature.seams]
        optimizers = [name for name in names if name.startswith("optim.")]
        if others := [name for name in optimizers if name not in ("optim.adamw", "optim.sgd")]:
            raise ConflictError(
                f"`{self.name}` freezes the second moments of Adam, and the optimizer is `{others[0]}`",
                hint="train with [optim.adamw]",
            )
        if any(other.scales_loss for other in attachments.features):
            raise ConflictError("`sparse.step` does not know which steps a loss scaler skips", hint="train in bf16")

    def method(self, attachments: Attachments) -> SparseMethod:
        from shoestring.sparse.held import HeldMoments

        return HeldMoments(attachments, self)


@dataclass(frozen=True, kw_only=True)
class TSRSTE(Masked):
    """T-SR-STE (Hu et al., 2024): masks that are 2:4 in rows and columns, so that forward pass and input gradients are
    both sparse; masked weights decay, and the last steps are dense."""

    refresh: int = 40
    """Optimizer steps between two refreshes of the masks; a larger number takes less time, but masks lag further
    behind the weights."""
    norm: Literal["l1", "l2"] = "l1"
    """Norm that masks maximise in each 4×4 tile: the sum of kept magnitudes (`l1`), or of kept squares (`l2`)."""
    masked_decay: float = 6e-5
    """Decay factor: this multiple of the masked weights is added to their gradients, after clipping; with a larger
    factor masks change less. Unless `calibrate` is 0, this factor is only the start of the search."""
    calibrate: float = 0.05
    """Share of the steps, at the start, that search for the decay factor: rows train with different factors or dense,
    and the search picks the factor with which masks change 0.6 to 0.95 times as often as in dense training; 0 uses
    `masked_decay`."""
    tail: float = 1 / 6
    """Share of the steps, at the end, that train dense. The exported model is dense too, unless the share is 0."""

    @property
    def mask(self) -> MaskName:
        return "transposable"

    @property
    def rows_too(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class AST(Masked):
    """AST (Huang et al., 2025): fine-tune a dense model to 2:4. The decay of masked weights grows, the dense model
    teaches the sparse one (distillation), and small adapters (SLoRB) make up for the dropped weights."""

    layers: tuple[str, ...] = ()
    """Name patterns of the linear layers to make sparse, such as `blocks.*.mlp.*`; by default all linear layers in the
    model's repeated blocks, but neither embeddings nor the output head."""
    metric: Literal["magnitude", "wanda"] = "magnitude"
    """Score that decides which two of four weights are kept: `magnitude`, or magnitude times the norm of the input
    (`wanda`), which is measured during training; before the first refresh, masks use the magnitude."""
    refresh: int = 10
    """Optimizer steps between two refreshes of the masks; a larger number takes less time, but masks lag further
    behind the weights. The exported model has the last masks."""
    masked_decay: float = 1.0
    """Largest decay factor: this multiple of the masked weights is added to their gradients, after clipping; with a
    larger factor masks change less."""
    masked_decay_scale: Literal["gradient", "none"] = "gradient"
    """Scale of the decay factor: `gradient` multiplies it, layer by layer, by the norm of the gradient divided by the
    norm of the weight, so that one factor suits all models; `none` leaves the factor unscaled, as AST's paper does,
    with 6e-5 for models of 100 million parameters."""
    masked_decay_warmup: float = 0.25
    """Share of the steps, at the start, over which the decay factor rises from 0 to its largest value."""
    distillation: float = 0.67
    """Share of the distillation loss in the total loss; the rest is the loss of the task. With 0 there is no teacher; a
    teacher costs one forward pass per step and the memory for its weights."""
    temperature: float = 2.0
    """Temperature of the distillation: above 1, the teacher's small probabilities have more weight."""
    teacher: str = ""
    """Dense model to learn from, named as for `shoestring generate`; by default the model that the run starts from."""
    slorb: int = 16
    """Number of neighbouring inputs that share one weight of a layer's SLoRB adapter. 16 adds adapter weights of 1/16
    of the layer's size, which are trained and exported beside the sparse weights; a smaller number adds more. 0 adds no
    adapter."""

    @property
    def seams(self) -> tuple[Seam, ...]:  # pyrefly: ignore[bad-override]
        """The seams include LOSS only if there is a teacher; without a teacher, AST attaches to any training loop."""
        return (Seam.MODEL, Seam.LOSS, Seam.STEP) if self.distillation else (Seam.MODEL, Seam.STEP)

    @property
    def adds_parameters(self) -> bool:  # pyrefly: ignore[bad-override]
        """Whether there are SLoRB adapters."""
        return self.slorb > 0

    @property
    def decay_below(self) -> float:
        return 1.0 if self.masked_decay_scale == "none" else 100.0

    def check(self, attachments: Attachments) -> None:
        Masked.check(self, attachments)
        for name, share in (("masked_decay_warmup", self.masked_decay_warmup), ("distillation", self.distillation)):
            if not 0 <= share <= 1:
                raise ConfigError(f"`{self.name}.{name}` is a share in [0, 1], got {share}")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"`{self.name}.temperature` must be positive, got {self.temperature}")
        if self.slorb < 0 or self.slorb % 4:
            raise ConfigError(f"`{self.name}.slorb` must be a multiple of four, or 0, got {self.slorb}")
        for other in attachments.features:
            if isinstance(other, Sparsity) and other is not self:
                raise ConflictError(f"`{self.name}` copies the dense model, which `{other.name}` makes sparse too")
        if self.distillation and self.teacher:
            from shoestring.models.distillation import check_vocabulary

            check_vocabulary(attachments.module, self.teacher, f"{self.name}.teacher")

    def choose(self, attachments: Attachments) -> LinearLayers:
        from shoestring.models.blocks import is_in_block
        from shoestring.sparse.layers import choose, leave_frozen

        return leave_frozen(choose(attachments.module, self.layers, rows_too=False, default=is_in_block))

    def method(self, attachments: Attachments) -> SparseMethod:
        from shoestring.sparse.finetuning import AnnealedMasks

        return AnnealedMasks(attachments, self)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.models.distillation import distil, freeze_teacher

        teacher = f"{self.name}.teacher"
        if seam is Seam.LOSS:
            distil(
                attachments, attachments.frozen_modules[teacher], share=self.distillation, temperature=self.temperature
            )
            return
        if seam is Seam.MODEL and self.distillation:
            freeze_teacher(attachments, teacher, self.teacher)
        Masked.apply(self, attachments, seam)

    def explain(self, attachments: Attachments) -> str:
        line = Masked.explain(self, attachments)
        if self.distillation:
            line += f"; learns from {f'`{self.teacher}`' if self.teacher else 'the model that it starts from'}"
        return line + (f"; SLoRB adds 1/{self.slorb} of the weights of these layers" if self.slorb else "")

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        parts = {"task_loss": "loss of the task", "distillation": "divergence from the teacher"}
        of_loss = [Curve(title="Parts of the loss", metrics=parts, unit="nats a token")] if self.distillation else []
        return [*Masked.report_items(self, trace), *of_loss]
