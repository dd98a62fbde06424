"""Turns logits into the distribution of the next token, for the model and for drafters alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoestring.decode.settings.generation import Sampling

COLD = 2.0**-20
"""Temperature below which the largest logit is subtracted first, because dividing by the temperature might overflow."""
COLDEST = 2.0**-126
"""Lower bound of the temperature, the smallest normal number of float32; at this temperature, only the likeliest tokens
can be drawn."""
NUCLEUS = 512
"""Number of likeliest tokens that top-p sorts first; most nuclei are smaller, and sorting a whole vocabulary is
slow."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (…, V) to sample from: float64 for float64 logits, else float32; one-hot if sampling is greedy.

    The logits must already include the repetition penalty (see `penalize`). Every filter keeps all tokens whose
    probability reaches a bound, so tokens of equal probability are either all kept or all removed (top-p: Holtzman et
    al., 2020; min-p: Nguyen et al., 2024).
    """
    logits = _precise(logits)
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if sampling.temperature < COLD:
        logits = logits - logits.amax(-1, keepdim=True)
    chances = (logits / max(sampling.temperature, COLDEST)).softmax(-1)
    if 0 < sampling.top_k < chances.shape[-1]:
        chances = _keep(chances, chances.topk(sampling.top_k).values[..., -1:])
    if sampling.top_p < 1:
        chances = _keep(chances, _nucleus(chances, sampling.top_p, sampling.top_k))
    if sampling.min_p > 0:
        chances = _keep(chances, sampling.min_p * chances.amax(-1, keepdim=True))
    return chances


def penalize(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """Apply the repetition penalty to logits (T, V): each row is penalized for the tokens before it (Keskar et al.,
    2019).

    Args:
        logits: row t holds the logits after the t-th of the last T `tokens`; tokens drafted after it do not count.
        tokens: prompt, generated tokens and drafted tokens.
        penalty: divides a positive logit, and multiplies a negative one.
    """
    if penalty == 1:
        return logits
    logits = _precise(logits)
    penalized = logits.clone()

    def lower(first: int, seen: Sequence[int]) -> None:
        """Penalize the tokens `seen` in the rows from `first` on. Only the columns of these tokens are read and
        written, because a text holds far fewer distinct tokens than the vocabulary."""
        if max(seen) >= logits.shape[1]:  # some tokens have an embedding but no logit
            seen = [token for token in seen if token < logits.shape[1]]
        columns = torch.tensor(seen, dtype=torch.int64, device=logits.device)
        before = logits[first:].index_select(1, columns)
        penalized[first:].index_copy_(1, columns, torch.where(before > 0, before / penalty, before * penalty))

    before_first = len(tokens) - len(logits) + 1  # number of tokens that precede every position
    lower(0, list(set(tokens[:before_first])))
    for position, token in enumerate(tokens[before_first:], start=1):
        lower(position, [token])
    return penalized


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _keep(chances: Tensor, bound: Tensor) -> Tensor:
    """Remove the tokens that are less likely than a bound, and normalize the rest."""
    filtered = chances.masked_fill(chances < bound, 0.0)
    return filtered / filtered.sum(-1, keepdim=True)


def _descending(chances: Tensor) -> Tensor:
    """Sort in descending order; on a CPU by NumPy, which sorts in vector registers and takes a third of the time."""
    if chances.device.type == "cpu":
        return torch.from_numpy(np.sort(chances.detach().numpy(), axis=-1)).flip(-1)
    return chances.sort(-1, descending=True).values


def _nucleus(chances: Tensor, top_p: float, top_k: int) -> Tensor:
    """The probability (…, 1) of the least likely token of the nucleus, the smallest set of likeliest tokens whose
    probabilities add up to `top_p`."""
    V = chances.shape[-1]
    for count in (min(top_k or NUCLEUS, V), V):  # sort all tokens only if the likeliest ones do not reach top_p
        ordered = _descending(chances) if count == V else chances.topk(count).values
        before = ordered.cumsum(-1) - ordered
        if count == V or bool((before[..., -1] + ordered[..., -1] >= top_p).all()):
            break
    # At least the likeliest token is kept, even if `top_p` is 0 in this data type or the distribution is NaN.
    last = ((before < top_p).sum(-1, keepdim=True) - 1).clamp_(min=0)
    return ordered.gather(-1, last)
