"""Signs with error feedback: one bit per entry in both directions (EF-signSGD, Karimireddy et al., ICML 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.comm.codecs.quantize import ReduceScatterCodec


class SignCodec(ReduceScatterCodec):
    """Compresses each bucket M of n entries to (‖M‖₁ / n) sign(M), before the reduce-scatter and again before the
    all-gather.

    The paper has one scale per layer. One scale per bucket is more accurate, and costs 32 bits per bucket. A bucket of
    zeros has scale 0 and stays zero. A zero among other entries gets the sign +, and the residual corrects it at the
    next step.
    """

    offset = shift = 1
    top = 0
    compiled = True

    def __init__(self, *, bucket: int = 512) -> None:
        super().__init__(1, bucket=bucket, feedback=True)

    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        scale = x.abs().sum(-1, keepdim=True).div_(entries)
        signs = torch.ge(x, 0, out=torch.empty_like(x))  # output in fp32, because bool output takes four times as long
        return signs.mul_(2).sub_(1), scale
