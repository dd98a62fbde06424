"""Random-k with a shared seed and error feedback (Stich et al., NeurIPS 2018): all ranks select the same entries, so no
indices are sent, and values can be all-reduced."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.comm.codecs.codec import Coding, ExchangeContext, Grads, Mean
from shoestring.comm.codecs.flat import FlatCodec, count_entries, poison


class RandomKCodec(FlatCodec):
    """Averages k random entries, the same on all ranks, by one all-reduce of k values.

    State: "residual", if there is error feedback.

    Args:
        density: fraction of entries sent; at least one block is sent.
        block: number of neighbouring entries drawn together, because memory is read in lines of at least 16 entries.
        dtype: data type of the values on the wire. The residual includes this rank's rounding error, but not the
            rounding errors of the sums in the ring all-reduce.
        feedback: whether to add unsent entries to the gradients of the next step (error feedback). If false, sent
            entries are scaled by n / k, which is unbiased but noisy.
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
        M = self.flatten(grads)
        if self.feedback:
            M += self.flat_state("residual", grads)
        indices = self._draw_for(grads, n, context)
        own = M[indices] if self.feedback else M[indices] * (n / len(indices))
        sent = own.to(self.dtype)
        (average,) = yield [Mean(sent + poison(M).to(self.dtype))]
        out = M
        if self.feedback:
            out = self.flat_state("residual", grads)
            M[indices] = own - sent
            self.replace_state("residual", grads, M)
        out.zero_()[indices] = average.float()
        self.unflatten(grads, out)

    @property
    def replays(self) -> bool:
        return not self.feedback

    def decode_average(self, grads: Grads, answers: Sequence[Tensor], context: ExchangeContext) -> None:
        """See `Codec`."""
        n = sum(grad.numel() for grad in grads.values())
        if n:
            out = self.flatten(grads).zero_()
            out[self._draw_for(grads, n, context)] = answers[0].float()
            self.unflatten(grads, out)

    def _draw_for(self, grads: Grads, n: int, context: ExchangeContext) -> Tensor:
        """Draw the indices (below n) of the entries that this exchange sends; all ranks draw the same indices."""
        seed = zlib.crc32(repr((self.seed, context.step, *grads)).encode())
        return self.draw(n, seed, next(iter(grads.values())).device)

    def draw(self, n: int, seed: int, device: torch.device) -> Tensor:
        """Draw distinct indices below n: one random block from each of several equal strata.

        All indices are rotated by a random offset, so that every index has the same probability for any n.
        """
        block = min(self.block, n)
        blocks = n // block
        k = count_entries(blocks, self.density)
        generator = torch.Generator(device).manual_seed(seed)
        starts = torch.arange(k + 1, device=device) * blocks // k
        within = (torch.rand(k, generator=generator, dtype=torch.float64, device=device) * starts.diff()).long()
        offset = torch.randint(n, (1, 1), generator=generator, device=device)
        drawn = (starts[:-1] + within)[:, None] * block + torch.arange(block, device=device)
        return ((drawn + offset) % n).flatten()
