"""Measures the KL divergence between the next-token distributions of the policy and the reference model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Predictions(NamedTuple):
    """A model's predictions of the next token at N positions; logits are computed one chunk at a time."""

    hidden: Tensor
    """Hidden states (N, C) before the head, or logits (N, V) where there is no `weight`."""
    weight: Tensor | None = None
    """Weight of the head, (V, C)."""
    bias: Tensor | None = None
    """Bias of the head, (V,)."""

    def log_probabilities(self, chunk: slice) -> Tensor:
        """Log-probabilities of all tokens of the vocabulary at the n positions of a chunk, (n, V), in fp32 or fp64."""
        logits = self.hidden[chunk]
        if self.weight is not None:
            bias = None if self.bias is None else self.bias.to(logits.dtype)
            logits = F.linear(logits, self.weight.to(logits.dtype), bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


@torch.no_grad()
def divergence(policy: Predictions, reference: Predictions, tokens: int) -> Tensor:
    """KL(π ‖ π_ref) of the next token at each of N positions, in nats, (N,): Σ_v π(v) (log π(v) − log π_ref(v)).

    The sum runs over the whole vocabulary, so the divergence at one position has no sampling error. If the answers were
    sampled from the policy, the sum over an answer's positions is the Rao-Blackwellized estimator of the divergence of
    whole answers (Amini, Vieira and Cotterell, 2025). If the answers come from a data set, the divergence is measured
    in the contexts that occur in these answers.

    Args:
        tokens: number of positions whose logits are in memory at a time.
    """
    chunks = []
    for start in range(0, len(policy.hidden), tokens):
        chunk = slice(start, start + tokens)
        ours, theirs = policy.log_probabilities(chunk), reference.log_probabilities(chunk)
        probabilities = ours.exp()
        # A token with zero probability under the policy contributes 0, even if the difference is inf or NaN.
        terms = torch.where(probabilities > 0, probabilities * (ours - theirs), 0)
        chunks.append(terms.sum(-1).clamp_min(0))  # rounding errors can make a divergence of zero negative
    return torch.cat(chunks) if chunks else policy.hidden.new_zeros(0, dtype=torch.float32)


class DivergenceMeter:
    """Computes the divergence of the policy from the reference on one batch; the reference runs before the policy.

    Args:
        tokens: as in `divergence`.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.places: Tensor | None = None  # positions to measure in the current batch, bool (B, T), or None
        self.reference: Predictions | None = None
        self.values: Tensor | None = None

    def begin(self, places: Tensor | None) -> None:
        """Set the positions at which to measure the next batch, (B, T) bool; None measures nothing."""
        self.places, self.reference, self.values = places, None, None

    def observe(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Receive a model's output at all positions, (B, T, C or V); called for the reference, then for the policy."""
        if self.places is None:
            return
        predictions = Predictions(hidden.detach()[self.places], weight, bias)
        if self.reference is None:
            self.reference = predictions
        else:
            self.values = divergence(predictions, self.reference, self.tokens)
            self.places = self.reference = None
