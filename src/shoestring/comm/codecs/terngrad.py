"""TernGrad: gradients of three levels (Wen et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring._torch import foreach_mul_
from shoestring.comm.codecs.bits import pack, unpack
from shoestring.comm.codecs.codec import AllGather, AllToAll, Codec, Coding, ExchangeContext, Grads, Request
from shoestring.comm.codecs.dense import flatten, split_like, unflatten
from shoestring.comm.codecs.kernel_buckets import take
from shoestring.comm.codecs.quantize import add_noise_, draw_seed, make_generator
from shoestring.comm.codecs.ternary import BUCKET, TernaryEntries


class TernGradCodec(Codec):
    """Sends s sign(g) b for each tensor, where b is 1 with probability |g| / s, else 0, and s is equal on all ranks. No
    state.

    The estimate is unbiased except for clipping, so there is no residual. Entries are clipped at s, the maximum over
    ranks of min(max |g|, 2.5 σ). The paper clips the entries of each rank at the rank's own bound, which only adds
    bias, because all ranks use the same scale.

    Args:
        clip: clipping bound as a multiple of σ, the root mean square. (The standard deviation about the mean would clip
            a tensor of equal entries to zero.)
        reduce_scatter: let each rank sum one shard exactly, and gather the sums. The reduce-scatter adds a third stage,
            but the bytes do not grow with the number of ranks; from three ranks on, fewer bytes are sent.
    """

    def __init__(self, *, clip: float = 2.5, reduce_scatter: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.clip, self.reduce_scatter, self.seed = clip, reduce_scatter, seed
        self.stages = 3 if reduce_scatter else 2

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        if not grads:
            return
        if not self.reduce_scatter and take(grads.values(), BUCKET):
            # Triton kernels run these steps and read the gradients in place.
            entries = TernaryEntries([grad.view(-1) for grad in grads.values()])
            (scales,) = yield [AllGather(entries.scales(self.clip))]
            s = context.verdict.poison(scales.amax(0))
            (codes,) = yield [AllGather(entries.encode(s, draw_seed(self.seed, context, grads)))]
            entries.decode(codes, s)
            return
        tensors = list(grads.values())
        flat = flatten(tensors)
        parts = split_like(flat, tensors)
        largest = torch.stack([part.abs().amax() for part in parts])
        sigma = torch.stack([torch.linalg.vector_norm(part) / part.numel() ** 0.5 for part in parts])
        (scales,) = yield [AllGather(torch.minimum(largest, self.clip * sigma))]
        s = context.verdict.poison(scales.amax(0))
        foreach_mul_(parts, list(s.reciprocal().nan_to_num_(0, posinf=0)))
        add_noise_(flat, make_generator(self.seed, context, grads))
        levels = flat.round_().clamp_(-1, 1).add_(1).to(torch.uint8)
        sum_over_ranks = _reduce_scatter if self.reduce_scatter else _gather_and_sum
        sums = yield from sum_over_ranks(levels, context.size)
        flat.copy_(sums).sub_(context.size)  # levels were sent as 0 to 2, so that sums are unsigned
        foreach_mul_(parts, list(s / context.size))
        unflatten(flat, tensors)

    def guards(self, grads: Grads) -> bool:
        """See `Codec`: the codec has no state to restore, and a scale of NaN makes all gradients NaN."""
        return True


def _gather_and_sum(levels: Tensor, ranks: int) -> Generator[Sequence[Request], list[Tensor], Tensor]:
    """Sum levels (n,) from 0 to 2 over ranks: gather the levels of all ranks, and sum on every rank."""
    (gathered,) = yield [AllGather(pack(levels[None], 2)[0])]
    sums = levels.new_zeros(len(levels), dtype=_counter_dtype(ranks))
    for packed in gathered:
        sums += unpack(packed[None], 2, len(levels))[0]
    return sums


def _reduce_scatter(levels: Tensor, ranks: int) -> Generator[Sequence[Request], list[Tensor], Tensor]:
    """Sum levels (n,) from 0 to 2 over ranks: each rank sums one shard, and an all-gather collects the sums."""
    rows = F.pad(levels, (0, -len(levels) % ranks)).view(ranks, -1)
    (received,) = yield [AllToAll(pack(rows, 2))]
    shard = unpack(received, 2, rows.shape[1]).sum(0, dtype=_counter_dtype(ranks))
    bits = (2 * ranks).bit_length()
    (sums,) = yield [AllGather(pack(shard[None], bits)[0])]
    return unpack(sums, bits, rows.shape[1]).flatten()[: len(levels)]


def _counter_dtype(ranks: int) -> torch.dtype:
    """The smallest integer type that holds the sum of all ranks' levels."""
    return torch.uint8 if 2 * ranks < 256 else torch.int16
