"""The codec of SparseLoCo (Sarfi et al., arXiv 2508.15706): the largest entries of each chunk, at two bits, with decay.

Two things differ from the paper's code. An entry's two bits are its sign and which of two magnitudes it has, of the
chunk rather than of the tensor: 4 bytes more for 112, and a chunk in which nothing happened says nothing. And the mean
is over all ranks, not over those that sent an entry, so that what is sent and what is kept add up to what there was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shoestring.comm.codec import Codec, Coding, Gather, Grads, Turn
from shoestring.core._torch import foreach_add_, foreach_copy_

CHUNK = 4096  # entries; an index takes 12 bits


class ChunkedTopK(Codec):
    """Of every 4096 entries the `k` largest: M = beta e + g; e = M - what of it was sent.

    State: "residual". Tensors are cut into chunks as they lie in memory, each for itself.

    Args:
        k: entries of each chunk; a multiple of 4.
        beta: decay of the residual at each exchange.
    """

    stages = 1

    def __init__(self, k: int = 64, beta: float = 0.95) -> None:
        super().__init__()
        self.k, self.beta = k, beta

    def code(self, grads: Grads, turn: Turn) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        tensors, residuals = list(grads.values()), self.keep("residual", grads)
        M, parts, lengths = in_chunks(tensors)
        foreach_copy_(parts, residuals)
        M *= self.beta
        foreach_add_(parts, [tensor.float() for tensor in tensors])

        within = torch.arange(CHUNK, device=M.device) < lengths[:, None]
        indices = M.abs().masked_fill_(~within, -1).topk(self.k, sorted=False).indices
        bits, levels = quantized(M.gather(1, indices), within.gather(1, indices))
        theirs = yield [Gather(pack12(indices)), Gather(bits), Gather(levels)]

        M.scatter_add_(1, indices, -restored(bits, levels))
        foreach_copy_(residuals, parts)
        M.zero_()
        for places, signs, sizes in zip(*theirs, strict=True):  # ranks in the same order everywhere: equal bits
            M.scatter_add_(1, unpack12(places), restored(signs, sizes))
        M /= turn.size
        foreach_copy_(tensors, parts)


def in_chunks(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Room for all tensors, each from the start of a chunk: (zeros (chunks, CHUNK), its parts in the tensors' shapes,
    how many entries of each chunk are no padding (chunks,))."""
    counts = [-(-tensor.numel() // CHUNK) for tensor in tensors]
    starts = list(accumulate(counts, initial=0))
    room = torch.zeros(starts[-1], CHUNK, device=tensors[0].device)
    flat = room.view(-1)
    parts = [flat[start * CHUNK :][: t.numel()].view(t.shape) for start, t in zip(starts, tensors, strict=False)]
    lengths = torch.full((starts[-1],), CHUNK)
    lengths[[end - 1 for end in starts[1:]]] -= torch.tensor([-tensor.numel() % CHUNK for tensor in tensors])
    return room, parts, lengths.to(room.device)


def quantized(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Values (chunks, k) as two bits each, four to a byte (chunks, k / 4), and two magnitudes a chunk in bf16.

    The magnitudes are the means of those up to the chunk's mean and of those above it; entries that do not count are
    left out of them.
    """
    size, weight = values.abs(), counts.to(values.dtype)
    middle = mean(size, weight)
    large = size > middle
    levels = torch.cat([mean(size, weight * ~large), mean(size, weight * large)], dim=1).bfloat16()
    codes = ((values < 0).to(torch.uint8) << 1 | large.to(torch.uint8)).unflatten(1, (-1, 4))
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6, levels


def mean(values: Tensor, weight: Tensor) -> Tensor:
    """Along the last dimension, which stays; 0 where nothing counts."""
    return (values * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_(min=1)


def restored(bits: Tensor, levels: Tensor) -> Tensor:
    """The inverse of `quantized`, in fp32."""
    codes = torch.stack([bits >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    sizes = levels.float().gather(1, (codes & 1).long())
    return torch.where(codes > 1, -sizes, sizes)


def pack12(indices: Tensor) -> Tensor:
    """Integers below 4096 (n, k), k even, as (n, 3 k / 2) bytes: two to three bytes."""
    one, two = indices.unflatten(1, (-1, 2)).unbind(-1)
    return torch.stack([one & 255, one >> 8 | (two & 15) << 4, two >> 4], dim=-1).to(torch.uint8).flatten(1)


def unpack12(packed: Tensor) -> Tensor:
    """The inverse of `pack12`, as int64."""
    low, middle, high = packed.long().unflatten(1, (-1, 3)).unbind(-1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=-1).flatten(1)
