"""The distribution that the next token is sampled from."""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities (V,) in float32 after temperature, then top-k, then top-p.

    Of equally likely tokens the first are kept (Holtzman et al. 2020 for top-p). `temperature` is above 0.
    """
    ordered, index = (logits.float() / temperature).sort(descending=True, stable=True)
    if top_k:
        ordered, index = ordered[:top_k], index[:top_k]
    kept = ordered.softmax(-1)
    kept = kept.masked_fill(kept.cumsum(-1) - kept >= top_p, 0.0)
    return torch.zeros(logits.shape, device=logits.device).scatter(-1, index, kept / kept.sum())
