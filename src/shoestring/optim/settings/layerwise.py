"""Settings of LARS and LAMB, which scale each tensor's step for large batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Curve, Seam
from shoestring.optim.settings.bases import AdamSettings, MomentumSettings, OptimizerSettings
from shoestring.optim.settings.groups import check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, momentum_of_nesterov, positive

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class LayerwiseSettings(OptimizerSettings):
    """Base class of LARS and LAMB."""

    share_norms: bool = False
    """Whether replicas divide the computation of norms among them and exchange the results."""

    seams: ClassVar = (Seam.OPTIM, Seam.STEP)

    def report_items(self, trace: Trace) -> Sequence[Curve]:
        return (Curve(title="Trust ratios", metrics={"trust_ratio": "Median", "clipped_tensors": "Share clipped"}),)


@dataclass(frozen=True, kw_only=True)
class LARS(MomentumSettings, LayerwiseSettings):
    """SGD with a trust ratio for each tensor, the norm of its weights divided by the norm of its gradient (You et al.,
    2017).

    Biases and norms are neither scaled nor decayed, and have a learning rate of their own.
    """

    lr: float = 1.0
    """Learning rate of matrices and larger tensors before any schedule; multiplied by their trust ratio."""
    vector_lr: float = 0.0
    """Learning rate of biases and norms, which have no trust ratio; required."""
    trust_coefficient: float = 0.001
    """Trust coefficient: norm of a step at a learning rate of 1, as a fraction of the weights' norm."""
    nesterov: bool = False
    """Evaluate the gradient ahead along the velocity (Nesterov momentum)."""
    weight_decay: float = 1e-4
    """Weight decay of matrices and larger tensors, added to the gradient; biases and norms do not decay."""
    eps: float = 1e-8
    """Constant added to the denominator of the trust ratio."""
    rate_in_velocity: bool = True
    """Whether the velocity accumulates steps, learning rate included, as in the paper; if false, the velocity
    accumulates gradients, as in torch's SGD. Results differ only while the learning rate changes."""
    ratio_clip: Literal["none", "larc", "dynamic"] = "none"
    """Upper bound of trust ratios: `larc` limits the step of a tensor to its length without a trust ratio; `dynamic`
    limits ratios to a running quantile over all tensors times a factor, which grows from 1 to `bound` over the first
    `bound_warmup` steps."""
    quantile: float = 0.5
    """Quantile of all tensors' trust ratios that the dynamic bound follows."""
    bound: float = 10.0
    """Factor between the quantile of trust ratios and the dynamic bound, after the first `bound_warmup` steps."""
    bound_warmup: int = 100
    """Steps over which the factor of the dynamic bound grows from 1 to `bound`."""

    def check(self, attachments: Attachments) -> None:
        positive(self, "lr", "trust_coefficient", "eps", "bound")
        at_least_zero(self, "momentum", "weight_decay", "bound_warmup")
        momentum_of_nesterov(self)
        if not 0 < self.quantile < 1:
            raise ConfigError(f"`{self.name}.quantile` must lie between 0 and 1, got {self.quantile}")
        vectors = [name for name, parameter in attachments.trained.items() if parameter.ndim < 2]
        if self.vector_lr <= 0 and vectors:
            raise ConfigError(
                f"`{self.name}.vector_lr` is not given, and `{vectors[0]}` has no trust ratio to scale its rate",
                hint="give the learning rate that plain SGD would take, such as 0.1",
            )
        check_groups(self, self.groups, attachments)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.layerwise import build_lars, publish

        (build_lars if seam is Seam.OPTIM else publish)(attachments, self)


@dataclass(frozen=True, kw_only=True)
class LAMB(AdamSettings, LayerwiseSettings):
    """Adam whose step is scaled, tensor by tensor, in proportion to the norm of the weights (You et al., 2020).

    Biases and norms are neither scaled nor decayed.
    """

    lr: float = 2e-3
    """Learning rate before any schedule: norm of a step, as a fraction of the weights' norm."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: float = 1e-6
    """Constant added to the root of the average of squared gradients, against division by zero."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices and larger tensors; biases and norms do not decay."""
    max_ratio: float = 10.0
    """Upper bound of trust ratios; 1 is LAMBC (Fong et al., 2020)."""

    def check(self, attachments: Attachments) -> None:
        positive(self, "lr", "eps", "max_ratio")
        at_least_zero(self, "weight_decay")
        betas_below_one(self, self.betas)
        check_groups(self, self.groups, attachments)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.layerwise import build_lamb, publish

        (build_lamb if seam is Seam.OPTIM else publish)(attachments, self)
