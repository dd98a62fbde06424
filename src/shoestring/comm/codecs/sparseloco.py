"""The codec of SparseLoCo (Sarfi et al., arXiv 2508.15706): the largest entries of each chunk, quantised to two bits.

Three things differ from the paper's code. First, the two bits of an entry are the sign and the choice between two
magnitudes per chunk; the paper's code has magnitudes per tensor. Magnitudes per chunk cost 4 bytes per chunk, and a
chunk of zeros is sent as zeros. Second, the mean is over all ranks, not only over the ranks that sent an entry, so that
sent entries and residuals add up to the gradient. Third, indices take 8 bits, not 12 as in the paper's code, because
they are sent in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_
from shoestring.comm.codecs.bits import decode_indices, encode_indices, pack, unpack
from shoestring.comm.codecs.codec import AllGather, Codec, Coding, ExchangeContext, Grads

CHUNK = 4096  # number of entries in a chunk


class SparseLoCoCodec(Codec):
    """Sends the `k` largest entries of every chunk of 4096 entries of M = beta e + g; the unsent rest of M becomes the
    residual e.

    State: "residual". Each tensor is divided into chunks in memory order.

    Args:
        k: number of entries sent per chunk.
        beta: factor by which the residual decays at each exchange.
    """

    stages = 1

    def __init__(self, k: int = 64, beta: float = 0.95) -> None:
        super().__init__()
        self.k, self.beta = k, beta

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        tensors, residuals = list(grads.values()), self.get_states("residual", grads)
        M, parts, lengths = cut_into_chunks(tensors)
        foreach_copy_(parts, residuals)
        M *= self.beta
        foreach_add_(parts, [tensor.float() for tensor in tensors])

        within = torch.arange(CHUNK, device=M.device) < lengths[:, None]
        indices = M.abs().topk(self.k, sorted=False).indices.sort().values
        codes, levels = quantize(M.gather(1, indices), within.gather(1, indices))
        gathered = yield [AllGather(encode_indices(indices, CHUNK)), AllGather(pack(codes, 2)), AllGather(levels)]

        M.scatter_add_(1, indices, -dequantize(codes, levels))
        foreach_copy_(residuals, parts)
        M.zero_()
        # Every rank adds the contributions in the order of the ranks, so that sums are bitwise equal on all ranks.
        for packed_indices, packed_codes, rank_levels in zip(*gathered, strict=True):
            sent = dequantize(unpack(packed_codes, 2, self.k), rank_levels)
            M.scatter_add_(1, decode_indices(packed_indices, self.k, CHUNK), sent)
        M /= context.size
        foreach_copy_(tensors, parts)


def cut_into_chunks(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Allocate chunks for the entries of all tensors; each tensor starts a new chunk.

    Returns:
        Zeros (chunks, CHUNK); views into the zeros in the tensors' shapes; the number of entries in each chunk without
        padding (chunks,).
    """
    counts = [-(-tensor.numel() // CHUNK) for tensor in tensors]
    starts = list(accumulate(counts, initial=0))
    room = torch.zeros(starts[-1], CHUNK, device=tensors[0].device)
    flat = room.view(-1)
    parts = [flat[start * CHUNK :][: t.numel()].view(t.shape) for start, t in zip(starts, tensors, strict=False)]
    lengths = torch.full((starts[-1],), CHUNK)
    lengths[[end - 1 for end in starts[1:]]] -= torch.tensor([-tensor.numel() % CHUNK for tensor in tensors])
    return room, parts, lengths.to(room.device)


def quantize(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values (chunks, k) to two-bit codes in uint8 and two magnitudes per chunk in bf16.

    With m the mean magnitude of the chunk's values, one magnitude is the mean over values with |value| <= m, the other
    over values with |value| > m. Padding (where `counts` is false) is not included in any mean.
    """
    size, weight = values.abs(), counts.to(values.dtype)
    middle = weighted_mean(size, weight)
    large = size > middle
    levels = torch.cat([weighted_mean(size, weight * ~large), weighted_mean(size, weight * large)], dim=1).bfloat16()
    return (values < 0).to(torch.uint8) << 1 | large.to(torch.uint8), levels


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean over the last dimension, which is kept with size 1; 0 if all weights are 0."""
    return (values * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_(min=1)


def dequantize(codes: Tensor, levels: Tensor) -> Tensor:
    """The inverse of `quantize`, in fp32."""
    sizes = levels.float().gather(1, (codes & 1).long())
    return torch.where(codes > 1, -sizes, sizes)
