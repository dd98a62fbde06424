"""Random-k with a shared seed and error feedback (Stich et al., NeurIPS 2018): no indices, so it can be all-reduced."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from shoestring.comm.codecs.codec import Coding, ExchangeContext, Grads, Mean
from shoestring.comm.codecs.topk import FlatCodec, count_entries


class RandomKCodec(FlatCodec):
    """The average of k random entries, the same on all ranks, by one all-reduce of k values.

    State: "residual", where there is feedback.

    Args:
        density: the part of the entries that is sent, at least one block.
        block: neighbours that are drawn together; memory is read in lines of at least 16 of them.
        dtype: of the values on the wire. The residual keeps this rank's rounding; that of the ring's sums is lost.
        feedback: keep what is not sent. Without it what is sent is scaled by n / k, which is unbiased and noisy.
    """

    stages = 1

    def __init__(
        self,
        density: float,
        *,
        block: int = 16,
        dtype: torch.dtype = torch.float32,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.density, self.block, self.dtype, self.feedback, self.seed = density, block, dtype, feedback, seed

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        n = sum(grad.numel() for grad in grads.values())
        if not n:
            return
        M = self.gathered(grads)
        if self.feedback:
            M += self.flat("residual", grads)
        indices = self.drawn(n, zlib.crc32(repr((self.seed, context.step, *grads)).encode()), M.device)
        own = M[indices] if self.feedback else M[indices] * (n / len(indices))
        sent = own.to(self.dtype)
        # An entry that is not finite must show at once, though it may not be among those that are sent.
        (average,) = yield [Mean(sent + (0 * M.sum()).to(self.dtype))]
        out = M
        if self.feedback:
            out = self.flat("residual", grads)
            M[indices] = own - sent
            self.replace("residual", grads, M)
        out.zero_()[indices] = average.float()
        self.spread(grads, out)

    def drawn(self, n: int, seed: int, device: torch.device) -> Tensor:
        """Distinct indices below n: a block at random in each of equal strata.

        All are turned by a random number of entries, so that each has the same probability, however n divides.
        """
        block = min(self.block, n)
        blocks = n // block
        k = count_entries(blocks, self.density)
        generator = torch.Generator(device).manual_seed(seed)
        starts = torch.arange(k + 1, device=device) * blocks // k
        within = (torch.rand(k, generator=generator, dtype=torch.float64, device=device) * starts.diff()).long()
        turn = torch.randint(n, (1, 1), generator=generator, device=device)
        drawn = (starts[:-1] + within)[:, None] * block + torch.arange(block, device=device)
        return ((drawn + turn) % n).flatten()
