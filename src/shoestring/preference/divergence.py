"""Measures how far the policy has moved from the reference: the KL divergence of what they predict after each token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Predictions(NamedTuple):
    """What a model predicts at N places of its texts; logits are computed a chunk at a time."""

    hidden: Tensor
    """Hidden states (N, C) before the head, or logits (N, V) where there is no `weight`."""
    weight: Tensor | None = None
    """Weight of the head, (V, C)."""
    bias: Tensor | None = None
    """Bias of the head, (V,)."""

    def log_probabilities(self, chunk: slice) -> Tensor:
        """Log-probabilities of all tokens at some places, (n, V), in fp32 or fp64."""
        logits = self.hidden[chunk]
        if self.weight is not None:
            bias = None if self.bias is None else self.bias.to(logits.dtype)
            logits = F.linear(logits, self.weight.to(logits.dtype), bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


@torch.no_grad()
def divergence(policy: Predictions, reference: Predictions, tokens: int) -> Tensor:
    """KL(π ‖ π_ref) of the next token at each of N places, in nats, (N,): Σ_v π(v) (log π(v) − log π_ref(v)).

    The sum is over the whole vocabulary, so there is no sampling error at a place; along answers that the policy draws,
    the sums over their places are the Rao-Blackwellized estimator of the divergence of whole answers (Amini, Vieira and
    Cotterell, 2025). Along answers of a data set it is the divergence in the contexts that these answers make.

    Args:
        tokens: number of places whose logits are in memory at a time.
    """
    chunks = []
    for start in range(0, len(policy.hidden), tokens):
        chunk = slice(start, start + tokens)
        ours, theirs = policy.log_probabilities(chunk), reference.log_probabilities(chunk)
        probabilities = ours.exp()
        # A token that the policy rules out adds nothing, also where the difference is inf or NaN.
        terms = torch.where(probabilities > 0, probabilities * (ours - theirs), 0)
        chunks.append(terms.sum(-1).clamp_min(0))  # rounding can take a divergence of zero below it
    return torch.cat(chunks) if chunks else policy.hidden.new_zeros(0, dtype=torch.float32)


class DivergenceMeter:
    """Takes what the reference and then the policy predict for one batch, and returns their divergence.

    Args:
        tokens: as in `divergence`.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.places: Tensor | None = None  # of the current batch, bool (B, T); None where nothing is measured
        self.reference: Predictions | None = None
        self.values: Tensor | None = None

    def begin(self, places: Tensor | None) -> None:
        """Measure the next batch at these places, (B, T) bool; not at all if None."""
        self.places, self.reference, self.values = places, None, None

    def observe(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Take what a model predicts at all places, (B, T, C or V): first the reference, then the policy."""
        if self.places is None:
            return
        predictions = Predictions(hidden.detach()[self.places], weight, bias)
        if self.reference is None:
            self.reference = predictions
        else:
            self.values = divergence(predictions, self.reference, self.tokens)
            self.places = self.reference = None
