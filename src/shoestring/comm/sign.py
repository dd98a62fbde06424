"""Signs with error feedback: one bit an entry both ways (EF-signSGD, Karimireddy et al., ICML 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.comm.bits import pack, unpack
from shoestring.comm.quantize import OwnerReduced


class Sign(OwnerReduced):
    """(‖M‖₁ / n) sign(M) of each bucket of n entries, to the owners and, of their averages, back.

    The paper's scale is one for each layer; one for each bucket leaves less out and costs 32 bits a bucket. A bucket
    of zeros has scale 0 and stays zero. The sign of a single zero is +; the residual takes it back at the next step.
    """

    def __init__(self, *, bucket: int = 512) -> None:
        super().__init__(bucket=bucket, feedback=True)

    def compress(self, x: Tensor, entries: Tensor, noise: torch.Generator) -> list[Tensor]:
        scale = x.abs().sum(-1, keepdim=True) / entries
        return [pack((x >= 0).view(torch.uint8).flatten(1), 1), scale]

    def expand(self, sent: Sequence[Tensor], out: Tensor) -> Tensor:
        bits, scale = sent
        signs = 2 * unpack(bits, 1, out[0].numel()).view(torch.int8).view(out.shape) - 1
        return torch.mul(signs, scale, out=out)
