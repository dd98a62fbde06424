"""From logits to the distribution of the next token; the same function for the model and for what drafts for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoestring.decode.settings import Sampling

NUCLEUS = 512
"""Tokens that top-p sorts first, because a whole vocabulary is slow to sort and most nuclei are smaller."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is sampled from: (…, V), float64 for float64 logits and else float32; the argmax alone where greedy.

    Repetition penalty is not part of it: see `penalize`. Every filter keeps the tokens that are at least as likely as
    some bound, so tokens as likely as the last one kept are kept with it (top-p: Holtzman et al. 2020; min-p: Nguyen
    et al. 2024).
    """
    logits = _precise(logits)
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    chances = (logits / sampling.temperature).softmax(-1)
    if 0 < sampling.top_k < chances.shape[-1]:
        chances = _keep(chances, chances.topk(sampling.top_k).values[..., -1:])
    if sampling.top_p < 1:
        chances = _keep(chances, _nucleus(chances, sampling.top_p, sampling.top_k))
    if sampling.min_p > 0:
        chances = _keep(chances, sampling.min_p * chances.amax(-1, keepdim=True))
    return chances


def penalize(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """Logits (T, V) with a penalty on the tokens before each position (Keskar et al. 2019).

    Args:
        logits: of the tokens that follow the last T of `tokens`, of which each position sees those up to itself alone:
            what was drafted after a position has no influence on it.
        tokens: prompt, text, and what is drafted.
        penalty: divides a positive logit and multiplies a negative one.
    """
    if penalty == 1:
        return logits
    logits = _precise(logits)
    penalized = logits.clone()

    def lower(first: int, seen: Sequence[int]) -> None:
        """Only tokens that were seen are computed: a text has far fewer of them than the vocabulary."""
        columns = torch.tensor(seen, dtype=torch.int64, device=logits.device)
        before = logits[first:].index_select(1, columns)
        penalized[first:].index_copy_(1, columns, torch.where(before > 0, before / penalty, before * penalty))

    sees = len(tokens) - len(logits) + 1  # tokens that the first position sees
    lower(0, list(set(tokens[:sees])))
    for position, token in enumerate(tokens[sees:], start=1):
        lower(position, [token])
    return penalized


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _keep(chances: Tensor, bound: Tensor) -> Tensor:
    kept = chances.masked_fill(chances < bound, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _descending(chances: Tensor) -> Tensor:
    """Sorted, the largest first; on a CPU by NumPy, which sorts in vector registers and takes a third of the time."""
    if chances.device.type == "cpu":
        return torch.from_numpy(np.sort(chances.detach().numpy(), axis=-1)).flip(-1)
    return chances.sort(-1, descending=True).values


def _nucleus(chances: Tensor, top_p: float, top_k: int) -> Tensor:
    """The probability of the last token of the nucleus, (…, 1): the likeliest tokens that add up to `top_p`."""
    V = chances.shape[-1]
    for count in (min(top_k or NUCLEUS, V), V):  # the second only where the first does not reach
        ordered = _descending(chances) if count == V else chances.topk(count).values
        before = ordered.cumsum(-1) - ordered
        if count == V or bool((before[..., -1] + ordered[..., -1] >= top_p).all()):
            break
    last = (before < top_p).sum(-1, keepdim=True) - 1
    return ordered.gather(-1, last)
