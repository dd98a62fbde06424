"""Signs with error feedback: one bit an entry both ways (EF-signSGD, Karimireddy et al., ICML 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.comm.codecs.quantize import ReduceScatterCodec


class SignCodec(ReduceScatterCodec):
    """(‖M‖₁ / n) sign(M) of each bucket of n entries, to the owners and, of their averages, back.

    The paper's scale is one for each layer; one for each bucket leaves less out and costs 32 bits a bucket. A bucket
    of zeros has scale 0 and stays zero. The sign of a single zero is +; the residual takes it back at the next step.
    """

    offset = shift = 1

    def __init__(self, *, bucket: int = 512) -> None:
        super().__init__(1, bucket=bucket, feedback=True)

    def encode(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        scale = x.abs().sum(-1, keepdim=True).div_(entries)
        signs = torch.ge(x, 0, out=torch.empty_like(x))  # into fp32: as Booleans it would take four times as long
        return signs.mul_(2).sub_(1), scale
