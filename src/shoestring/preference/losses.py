"""Losses of preference optimization, from the log-probabilities of answers under the policy and the reference model.

Each function returns a loss for every pair, (P,), to be minimized. `chosen` and `rejected` are `AnswerScores`, which
hold the log-probabilities of answers, summed over tokens, under the policy (with gradients) and under the reference
(without gradients).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Variant = Literal["sigmoid", "ipo", "hinge", "normalized"]


class Compared(NamedTuple):
    """The reference model of an objective, and the cache of the model's log-probabilities."""

    reference: str
    """Name of the reference model; empty for the model that training starts from."""
    cache_folder: str
    """Folder in which the reference's log-probabilities are cached; empty to compute them every time."""


class AnswerScores(NamedTuple):
    """The chosen or the rejected answers of P pairs; all tensors have the shape (P,), in fp32 or fp64."""

    policy: Tensor
    """Log-probability of the answer under the policy, log π(y | x): the sum over the answer's tokens."""
    tokens: Tensor
    """Number of tokens of the answer."""
    reference: Tensor | None = None
    """Log-probability of the answer under the reference, log π_ref(y | x); None for losses without a reference."""

    @property
    def ratio(self) -> Tensor:
        """Log-ratio of policy to reference, log(π(y | x) / π_ref(y | x)), (P,)."""
        assert self.reference is not None
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-probability of each answer's tokens under the policy, (P,)."""
        return self.policy / self.tokens


def dpo(chosen: AnswerScores, rejected: AnswerScores, *, beta: float, variant: Variant, smoothing: float) -> Tensor:
    """Loss of direct preference optimization (DPO, Rafailov et al., 2023) or of one of its variants.

    Let h be the log-ratio of the chosen answer minus the log-ratio of the rejected answer, h̄ the same difference after
    both log-ratios are divided by the answers' numbers of tokens, and ε the smoothing:
    - `sigmoid`: −(1 − ε) log σ(β h) − ε log σ(−β h); ε > 0 is conservative DPO (Mitchell, 2023);
    - `ipo`: (h̄ − 1 / 2β)² (Azar et al., 2023);
    - `hinge`: max(0, 1 − β h) (SLiC, Zhao et al., 2023);
    - `normalized`: as `sigmoid`, with h̄ in place of h (Lambert et al., 2024).
    """
    if variant in ("ipo", "normalized"):
        gap = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    else:
        gap = chosen.ratio - rejected.ratio
    match variant:
        case "ipo":
            return (gap - 1 / (2 * beta)) ** 2
        case "hinge":
            return torch.relu(1 - beta * gap)
        case _:
            return -(1 - smoothing) * F.logsigmoid(beta * gap) - smoothing * F.logsigmoid(-beta * gap)


def simpo(chosen: AnswerScores, rejected: AnswerScores, *, beta: float, margin: float, smoothing: float) -> Tensor:
    """Loss of SimPO (Meng et al., 2024), which needs no reference: −log σ(β (l_w − l_l) − γ).

    l_w and l_l are the mean log-probabilities of the tokens of the chosen and of the rejected answer; γ is `margin`.
    With `smoothing`, labels are smoothed as in `dpo`.
    """
    gap = beta * (chosen.mean - rejected.mean) - margin
    return -(1 - smoothing) * F.logsigmoid(gap) - smoothing * F.logsigmoid(-gap)


def orpo(chosen: AnswerScores, rejected: AnswerScores, *, weight: float) -> Tensor:
    """Loss of ORPO (Hong et al., 2024), which needs no reference: −log p_w − λ log σ(log odds_w − log odds_l).

    p_w and p_l are the exponentials of the mean log-probability of the tokens of the chosen and of the rejected answer;
    the odds are p / (1 − p), and λ is `weight`.
    """
    odds = (chosen.mean - rejected.mean) - (_log1mexp(chosen.mean) - _log1mexp(rejected.mean))
    return -chosen.mean - weight * F.logsigmoid(odds)


def kto(
    desirable: AnswerScores, undesirable: AnswerScores, divergence: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Losses of Kahneman–Tversky optimization (KTO, Ethayarajh et al., 2024) for desirable and undesirable answers.

    The loss is 1 − σ(β (r − z)) for a desirable answer and 1 − σ(β (z − r)) for an undesirable answer, where r is the
    answer's log-ratio and z the divergence. No gradient flows through z.

    Args:
        divergence: z, a scalar tensor ≥ 0: an estimate of KL(π ‖ π_ref) from answers to other prompts.
    """
    z = divergence.detach()
    return torch.sigmoid(-beta * (desirable.ratio - z)), torch.sigmoid(-beta * (z - undesirable.ratio))


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 − exp(x)) for x ≤ 0, accurately near 0 and for very negative x (Mächler, 2012); −inf at 0."""
    near = x > -0.6931471805599453
    inner = torch.where(near, x, -1.0)  # where this branch is unused, a constant keeps its gradient finite
    outer = torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(inner)), torch.log1p(-torch.exp(outer)))
