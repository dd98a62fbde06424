"""The settings of training with 2:4 sparse weights; free of torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Curve, Feature, Reduction, Seam, Table

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.sparse.attached import SparseMethod
    from shoestring.sparse.layers import LinearLayers

MaskName = Literal["rows", "transposable", "greedy", "torch_default"]


@dataclass(frozen=True, kw_only=True)
class Sparsity(Feature):
    """A way of training with 2:4 sparse weights, whatever they are computed by."""

    layers: tuple[str, ...] = ()
    """Patterns of the names of the linear layers to make sparse, such as `blocks.*.mlp.*`; by default the
    feed-forward layers."""
    mvue: bool = False
    """Make the gradients of outputs 2:4 as well, by unbiased draws, so that weight gradients are sparse products too;
    costs noise in every weight gradient."""
    seed: int = 0
    """Seed of the random draws of `mvue`."""

    seams: ClassVar = (Seam.MODEL, Seam.STEP)

    @property
    def rows_too(self) -> bool:
        """Whether masks are 2:4 along columns of the weight as well, so that its transpose is sparse too."""
        return False

    @abstractmethod
    def method(self, job: Job) -> SparseMethod:
        """What computes the sparse weights of the job's model."""

    @property
    def products(self) -> int:
        """How many of the three products of a linear layer's step are sparse."""
        return 1 + self.rows_too + self.mvue

    def check(self, job: Job) -> None:
        choice = self.choose(job)
        if not choice.sparse:
            what = "matches no linear layer" if not choice.dense else "leaves every layer dense"
            reasons = "; ".join(f"{name}: {why}" for name, why in list(choice.dense.items())[:3])
            raise ConfigError(
                f"`{self.name}` {what}" + (f": {reasons}" if reasons else f" of {type(job.module).__name__}"),
                hint=f"name layers by patterns in `{self.name}.layers`; there are {choice.examples}",
            )
        for other in job.features:
            theirs = other.choose(job).sparse if isinstance(other, Sparsity) and other is not self else {}
            if shared := [name for name in theirs if name in choice.sparse]:
                raise ConflictError(
                    f"`{self.name}` and `{other.name}` both make `{shared[0]}` sparse",
                    hint="give each its own `layers`",
                )

    def choose(self, job: Job) -> LinearLayers:
        """The layers of the job's model that become sparse, and why others do not."""
        from shoestring.sparse.layers import choose

        return choose(job.module, self.layers, rows_too=self.rows_too)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.sparse.attached import install

        install(job, self, seam)

    def explain(self, job: Job) -> str:
        from shoestring.sparse.attached import SparseLayers
        from shoestring.sparse.report import explained

        attached = job.kept[self.name].state if self.name in job.kept else None
        choice = (
            attached.choice if isinstance(attached, SparseLayers) else self.choose(job)
        )  # its layers are patched by now
        return explained(choice, self.products, job.world.device)

    def reduction(self, trace: Trace) -> Reduction | None:
        from shoestring.sparse.report import reduction

        return reduction(trace, self.products)

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        from shoestring.sparse.report import report_items

        return report_items(trace)


@dataclass(frozen=True, kw_only=True)
class SSTE(Sparsity):
    """S-STE (Hu et al., 2024): in each group of four, shrink the two largest weights by the third largest magnitude
    and zero the rest, which is continuous in the weights; train the dense weights straight through."""

    fp8: bool = False
    """Round the inputs of every product of a sparse layer to 8 bits (e4m3 forward, e5m2 for gradients); a simulation
    that shows what FP8 costs in loss and makes no step faster."""

    def method(self, job: Job) -> SparseMethod:
        from shoestring.sparse.soft import Shrunk

        return Shrunk(job, self)

    def export(self, weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.sparse.soft import shrink

        scales = kept[self.name]["scales"]
        return weights | {f"{name}.weight": shrink(weights[f"{name}.weight"]) * scales[name] for name in scales}


@dataclass(frozen=True, kw_only=True)
class Masked(Sparsity):
    """A way of training through a mask: dense weights get the gradient of the masked ones."""

    # No fields: what holds where a method has no setting of the name, and the bound that `decay` must stay below.
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
    def decay(self) -> float:
        return 0.0

    @property
    def decay_below(self) -> float:
        return 1.0

    @property
    def calibrate(self) -> float:
        return 0.0

    @property
    def tail(self) -> float:
        return 0.0

    def method(self, job: Job) -> SparseMethod:
        from shoestring.sparse.masked import Masks

        return Masks(job, self)

    def check(self, job: Job) -> None:
        Sparsity.check(self, job)
        if self.refresh < 1:
            raise ConfigError(f"`{self.name}.refresh` must be at least 1 step, got {self.refresh}")
        if not 0 <= self.decay < self.decay_below:
            raise ConfigError(f"`{self.name}.decay` must lie in [0, {self.decay_below:g}), got {self.decay}")
        for name, share in (("tail", self.tail), ("calibrate", self.calibrate)):
            if not 0 <= share < 1:
                raise ConfigError(f"`{self.name}.{name}` is a share of the steps in [0, 1), got {share}")

    def export(self, weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from shoestring.sparse.masked import pruned

        masks = kept[self.name]["masks"]
        return weights | {f"{name}.weight": pruned(weights[f"{name}.weight"], masks[name]) for name in masks}


@dataclass(frozen=True, kw_only=True)
class STE(Masked):
    """Train through a 2:4 mask, with the gradient passed straight through to all weights (the simplest baseline)."""

    mask: MaskName = "rows"
    """Kind of mask: the two largest of four in each row (`rows`), the best one that is 2:4 in rows and columns
    (`transposable`), what torch's greedy search finds by magnitude (`greedy`), or by signed value, as torch does by
    default (`torch_default`, only to compare with)."""
    refresh: int = 1
    """Optimizer steps between two computations of the masks; more steps cost less time and follow the weights
    later."""

    @property
    def rows_too(self) -> bool:
        return self.mask != "rows"


@dataclass(frozen=True, kw_only=True)
class SRSTE(Masked):
    """SR-STE (Zhou et al., 2021): train through a 2:4 mask of rows, and decay the weights that it leaves out."""

    decay: float = 2e-4
    """Factor by which masked weights are added to their gradients; a larger one makes masks change less."""


@dataclass(frozen=True, kw_only=True)
class STEP(Masked):
    """STEP (Lu et al., 2023): train dense until Adam's second moments are stable, then hold them and train through 2:4
    masks of rows (a baseline). SGD has none to hold."""

    earliest: float = 0.1
    """Share of the steps that are trained dense at least."""
    latest: float = 0.5
    """Share of the steps after which masks begin in any case; earlier where the mean change of second moments in a
    step, over 1 / (1 - beta2) steps, is below the optimizer's epsilon."""

    def check(self, job: Job) -> None:
        Masked.check(self, job)
        if not 0 <= self.earliest <= self.latest < 1:
            raise ConfigError(
                f"`{self.name}.earliest` and `latest` are shares with 0 <= earliest <= latest < 1,"
                f" got {self.earliest} and {self.latest}"
            )

    def method(self, job: Job) -> SparseMethod:
        from shoestring.sparse.held import HeldMoments

        return HeldMoments(job, self)


@dataclass(frozen=True, kw_only=True)
class TSRSTE(Masked):
    """T-SR-STE (Hu et al., 2024): 2:4 masks that hold for rows and columns, so that forward pass and input gradients
    are both sparse; masked weights decay through their gradients, and training ends dense."""

    refresh: int = 40
    """Optimizer steps between two computations of the masks; more steps cost less time and follow the weights
    later."""
    norm: Literal["l1", "l2"] = "l1"
    """Norm that masks keep the most of in each tile of four by four: the sum of magnitudes, or of squares."""
    decay: float = 6e-5
    """Factor by which masked weights are added to their gradients, after clipping; a larger one makes masks change
    less. Where `calibrate` is not 0, only where the search starts."""
    calibrate: float = 0.05
    """Share of the steps, at the start, in which rows train with different factors, dense rows among them, to choose
    the one that makes masks change 0.6 to 0.95 times as often as dense training does; 0 takes `decay`."""
    tail: float = 1 / 6
    """Share of the steps, at the end, in which the model is trained dense, and so leaves the run dense; 0 makes a
    sparse model."""

    @property
    def mask(self) -> MaskName:
        return "transposable"

    @property
    def rows_too(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class AST(Masked):
    """AST (Huang et al., 2025): fine-tune a dense model to 2:4 rows. Masked weights decay more and more, the dense
    model teaches the sparse one, and small adapters (SLoRB) make up for the weights that are dropped."""

    layers: tuple[str, ...] = ()
    """Patterns of the names of the linear layers to make sparse, such as `blocks.*.mlp.*`; by default all linear
    layers of the blocks, and neither embeddings nor the head."""
    metric: Literal["magnitude", "wanda"] = "magnitude"
    """Score by which two of four weights are kept: their magnitude, or that times the norm of their inputs (`wanda`),
    which is measured during training; until masks are first refreshed it is the magnitude."""
    refresh: int = 10
    """Optimizer steps between two computations of the masks; more steps cost less time and follow the weights later.
    The last masks are those of the model that leaves the run."""
    decay: float = 1.0
    """Largest factor by which masked weights are added to their gradients, after clipping; a larger one makes masks
    change less."""
    scale: Literal["gradient", "none"] = "gradient"
    """Scale of that factor: the norm of the gradient over the norm of the weight, layer by layer (`gradient`), so that
    one factor suits all models; or `none`, as in AST's paper, where 6e-5 suits models of 100 million parameters."""
    anneal: float = 0.25
    """Share of the steps, at the start, over which the decay factor rises from 0 to its largest value."""
    distillation: float = 0.67
    """Share of the distillation loss in the loss, the rest being the loss of the task; 0 trains without a teacher,
    which costs a forward pass of its own and the memory of its weights."""
    temperature: float = 2.0
    """Temperature of the distillation: above 1, the teacher's small probabilities count for more."""
    teacher: str = ""
    """Dense model to learn from, as `shoestring generate` takes it; by default the model that the run starts from."""
    slorb: int = 16
    """Inputs that share one weight of the SLoRB adapter of a layer: 16 adds 1/16 of the layer's weights, which train
    and leave the run beside the sparse ones; smaller blocks add more. 0 adds none, and the model is 2:4 alone."""

    @property
    def seams(self) -> tuple[Seam, ...]:  # pyrefly: ignore[bad-override]
        """LOSS where there is a teacher; without one it attaches to any loop."""
        return (Seam.MODEL, Seam.LOSS, Seam.STEP) if self.distillation else (Seam.MODEL, Seam.STEP)

    @property
    def adds_parameters(self) -> bool:  # pyrefly: ignore[bad-override]
        """The adapters, where there are some."""
        return self.slorb > 0

    @property
    def decay_below(self) -> float:
        return 1.0 if self.scale == "none" else 100.0

    def check(self, job: Job) -> None:
        Masked.check(self, job)
        for name, share in (("anneal", self.anneal), ("distillation", self.distillation)):
            if not 0 <= share <= 1:
                raise ConfigError(f"`{self.name}.{name}` is a share in [0, 1], got {share}")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"`{self.name}.temperature` must be positive, got {self.temperature}")
        if self.slorb < 0 or self.slorb % 4:
            raise ConfigError(f"`{self.name}.slorb` must be a multiple of four, or 0, got {self.slorb}")
        for other in job.features:
            if isinstance(other, Sparsity) and other is not self:
                raise ConflictError(f"`{self.name}` copies the dense model, which `{other.name}` makes sparse too")

    def choose(self, job: Job) -> LinearLayers:
        from shoestring.models.blocks import is_in_block
        from shoestring.sparse.layers import choose

        return choose(job.module, self.layers, rows_too=False, default=is_in_block)

    def method(self, job: Job) -> SparseMethod:
        from shoestring.sparse.finetuning import AnnealedMasks

        return AnnealedMasks(job, self)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.models.distillation import distil, freeze_teacher

        teacher = f"{self.name}.teacher"
        if seam is Seam.LOSS:
            distil(job, job.frozen_modules[teacher], share=self.distillation, temperature=self.temperature)
            return
        if seam is Seam.MODEL and self.distillation:
            freeze_teacher(job, teacher, self.teacher)
        Masked.apply(self, job, seam)

    def explain(self, job: Job) -> str:
        said = Masked.explain(self, job)
        if self.distillation:
            said += f"; learns from {f'`{self.teacher}`' if self.teacher else 'the model that it starts from'}"
        return said + (f"; SLoRB adds 1/{self.slorb} of the weights of these layers" if self.slorb else "")

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        parts = {"task_loss": "loss of the task", "distillation": "divergence from the teacher"}
        of_loss = [Curve(title="Parts of the loss", metrics=parts, unit="nats a token")] if self.distillation else []
        return [*Masked.report_items(self, trace), *of_loss]
