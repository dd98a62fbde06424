"""Settings of preference optimization: learning from pairs of answers, or from rated answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Curve, Feature, Seam

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.preference.losses import AnswerScores, Compared
    from shoestring.preference.objective import Objective, Pairs


@dataclass(frozen=True, kw_only=True)
class Preference(Feature):
    """Base class of objectives that learn from preferences."""

    tokens: int = 1024
    """Number of tokens whose logits are in memory at a time. A smaller number takes less memory; below a few hundred it
    also takes more time."""

    seams: ClassVar = (Seam.MODEL, Seam.LOSS)
    data_form: ClassVar = "preference"

    @property
    def compared(self) -> Compared | None:
        """The reference that the objective compares the model with; None for an objective without a reference."""
        return None

    @property
    def measures_divergence(self) -> bool:
        """Whether evaluations measure the divergence from the reference."""
        return False

    def check(self, attachments: Attachments) -> None:
        if self.tokens < 1:
            raise ConfigError(f"`{self.name}.tokens` must be at least 1, got {self.tokens}")
        for other in attachments.features:
            if other is not self and Seam.LOSS in other.seams:
                raise ConflictError(
                    f"`{self.name}` and `{other.name}` both replace the loss", hint="remove one of them"
                )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.preference.objective import Objective

        objective = attachments.carry(self, lambda: Objective(attachments, self))
        if seam is Seam.LOSS:
            objective.check_reference()
            objective.keep_cache()
            attachments.loss = attachments.task_loss = objective.loss

    @abstractmethod
    def losses(self, pairs: Pairs, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute the losses of pairs.

        Returns:
            The loss of each pair, (P,); whether each pair counts, (P,) bool; metrics by name, each (P,).
        """

    def report_items(self, trace: Trace) -> Sequence[Curve]:
        margins = {"reward_margin": "Training", "held_out_reward_margin": "Held out"}
        accuracies = {"reward_accuracy": "Training", "held_out_reward_accuracy": "Held out"}
        return (
            Curve(title="Reward margin of chosen over rejected answers", metrics=margins),
            Curve(title="Reward accuracy: fraction of pairs whose chosen answer is ahead", metrics=accuracies),
        )


@dataclass(frozen=True, kw_only=True)
class Referenced(Preference):
    """Base class of the objectives that compare the trained model with a reference model."""

    reference: str = ""
    """Reference model: a run folder, a model folder or `hf:NAME`, with the tokenizer of the trained model. Defaults to
    the model that training starts from. If adapters are trained, the reference is the model with adapters switched off;
    otherwise it is a frozen copy, which takes memory."""
    cache_folder: str = "reference"
    """Folder in which the reference's log-probabilities are cached by sample, so that later epochs need no forward pass
    of the reference. A relative path is inside the run folder. If empty, nothing is cached."""
    held_out_kl: bool = True
    """Whether evaluations also measure the KL divergence from the reference, as the mean over the tokens of held-out
    answers, in nats per token. The measurement takes a forward pass of the reference in each evaluation."""
    beta: float = 0.1
    """Strength β of the pull towards the reference: a larger value keeps the trained model closer to the reference."""

    def placed(self, folder: Path) -> Self:
        return replace(self, cache_folder=str(folder / self.cache_folder)) if self.cache_folder else self

    @property
    def tokenizer_of(self) -> str:
        return self.reference

    @property
    def measures_divergence(self) -> bool:
        return self.held_out_kl

    def report_items(self, trace: Trace) -> Sequence[Curve]:
        label = "Held-out answers, mean over tokens"
        divergence = Curve(
            title="KL divergence from the reference", metrics={"held_out_kl_per_token": label}, unit="nats"
        )
        return (*super().report_items(trace), divergence)

    @property
    def compared(self) -> Compared:
        from shoestring.preference.losses import Compared

        return Compared(self.reference, self.cache_folder)


@dataclass(frozen=True, kw_only=True)
class DPO(Referenced):
    """Learn from pairs of answers by direct preference optimization (DPO, Rafailov et al., 2023).

    Training raises the probability of chosen answers over that of rejected answers, relative to a reference model.
    """

    variant: Literal["sigmoid", "ipo", "hinge", "normalized"] = "sigmoid"
    """Loss of a pair. `sigmoid` is DPO's own loss. `ipo` is the squared distance from a margin of 1 / 2β per token,
    which does not overfit where one answer always wins. `hinge` is the loss of SLiC. `normalized` is DPO on log-ratios
    per token, which does not prefer long answers."""
    smoothing: float = 0.0
    """Assumed probability, below 0.5, that the labels of a pair are swapped (conservative DPO). 0 trusts all labels."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        _check_positive(self, "beta")
        _check_smoothing(self, self.smoothing)
        if self.smoothing and self.variant in ("ipo", "hinge"):
            raise ConfigError(
                f"`{self.name}.smoothing` is not defined for the variant {self.variant}", hint="set it to 0"
            )

    def losses(self, pairs: Pairs, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        from shoestring.preference.losses import dpo

        chosen, rejected, counts = complete(pairs)
        values = dpo(chosen, rejected, beta=self.beta, variant=self.variant, smoothing=self.smoothing)
        gap = self.beta * (chosen.ratio - rejected.ratio)
        return values, counts, {
            "reward_margin": gap,
            "reward_accuracy": (gap > 0).to(gap.dtype),
            "chosen_reward": self.beta * chosen.ratio,
            "rejected_reward": self.beta * rejected.ratio,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimPO(Preference):
    """Learn from pairs of answers by simple preference optimization (SimPO, Meng et al., 2024).

    The loss compares the mean log-probabilities per token of the two answers, without a reference model.
    """

    beta: float = 2.0
    """Scale β of the difference of mean log-probabilities: a larger value sharpens the preference."""
    margin: float = 1.0
    """Target margin γ, by which the scaled mean log-probability of the chosen answer should exceed that of the rejected
    answer."""
    smoothing: float = 0.0
    """Assumed probability, below 0.5, that the labels of a pair are swapped. 0 trusts all labels."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        _check_positive(self, "beta")
        _check_smoothing(self, self.smoothing)

    def losses(self, pairs: Pairs, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        from shoestring.preference.losses import simpo

        chosen, rejected, counts = complete(pairs)
        values = simpo(chosen, rejected, beta=self.beta, margin=self.margin, smoothing=self.smoothing)
        gap = self.beta * (chosen.mean - rejected.mean)
        return values, counts, {"reward_margin": gap, "reward_accuracy": (gap > 0).to(gap.dtype)}


@dataclass(frozen=True, kw_only=True)
class ORPO(Preference):
    """Learn from pairs of answers by odds-ratio preference optimization (ORPO, Hong et al., 2024), without a reference.

    The model learns the chosen answers as in fine-tuning, and raises their odds over the odds of the rejected answers.
    """

    weight: float = 0.1
    """Weight λ of the loss on the odds ratio, relative to the loss on the chosen answer's likelihood."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        _check_positive(self, "weight")

    def losses(self, pairs: Pairs, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        from shoestring.preference.losses import orpo

        chosen, rejected, counts = complete(pairs)
        gap = chosen.mean - rejected.mean
        return orpo(chosen, rejected, weight=self.weight), counts, {
            "reward_margin": gap,
            "reward_accuracy": (gap > 0).to(gap.dtype),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KTO(Referenced):
    """Learn from rated answers by Kahneman-Tversky optimization (KTO, Ethayarajh et al., 2024).

    Each answer is rated desirable or undesirable; pairs of answers to the same prompt are not needed.
    """

    desirable_weight: float = 1.0
    """Weight of the loss on desirable answers; choose a larger weight if they are rarer than undesirable answers."""
    undesirable_weight: float = 1.0
    """Weight of the loss on undesirable answers."""

    data_form: ClassVar = "rated"

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            _check_positive(self, name)

    def losses(self, pairs: Pairs, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        import torch

        from shoestring.preference.losses import kto

        good, bad = pairs.chosen.tokens > 0, pairs.rejected.tokens > 0
        others = pairs.mismatched.tokens > 0
        ratios = torch.where(others, pairs.mismatched.ratio, 0)
        z = objective.mean_over_ranks(ratios.sum(), others.sum()).clamp_min(0)
        desirable, undesirable = kto(pairs.chosen, pairs.rejected, z, beta=self.beta)
        values = torch.where(good, self.desirable_weight * desirable, self.undesirable_weight * undesirable)
        rewards = self.beta * torch.where(good, pairs.chosen.ratio, pairs.rejected.ratio)
        right = torch.where(good, rewards > self.beta * z, rewards < self.beta * z)
        return values, good | bad, {
            "reward_accuracy": right.to(values.dtype),
            "reward_margin": torch.where(good, rewards, -rewards),
            "kl": z.expand_as(values),
        }  # fmt: skip


def complete(pairs: Pairs) -> tuple[AnswerScores, AnswerScores, Tensor]:
    """Prepare pairs for a loss that needs both answers.

    Returns:
        The chosen answers, the rejected answers, and whether each pair has both, (P,) bool. A missing answer is
        replaced by one token with log-probability -1.
    """
    counts = (pairs.chosen.tokens > 0) & (pairs.rejected.tokens > 0)
    chosen, rejected = (side._replace(tokens=side.tokens.clamp_min(1)) for side in pairs[:2])
    # With a missing answer's log-probability of 0, ORPO's log odds would be infinite and the gradient NaN.
    fill = counts.logical_not().to(chosen.policy.dtype)
    return chosen._replace(policy=chosen.policy - fill), rejected._replace(policy=rejected.policy - fill), counts


def _check_positive(settings: Feature, name: str) -> None:
    if not getattr(settings, name) > 0:
        raise ConfigError(f"`{settings.name}.{name}` must be positive, got {getattr(settings, name)}")


def _check_smoothing(settings: Feature, smoothing: float) -> None:
    if not 0 <= smoothing < 0.5:
        raise ConfigError(f"`{settings.name}.smoothing` must lie in [0, 0.5), got {smoothing}")
