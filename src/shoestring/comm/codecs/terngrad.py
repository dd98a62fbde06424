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
    """s sign(g) b of each tensor, where b is 1 with probability |g| / s and s is shared by the ranks; no state.

    It is unbiased except for clipping, so it has no residual. Entries are clipped at s, the largest min(max |g|, 2.5 σ)
    of all ranks. The paper clips at each rank's own value, which only adds bias because the scale is shared.

    Args:
        clip: in standard deviations about zero rather than about the mean, so that a tensor of equal entries survives.
        reduce_scatter: each rank sums one shard exactly, and the sums are gathered. This is a third stage, but its
            bytes do not grow with the number of ranks. They are fewer from three ranks on.
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
            yield from self._code_by_kernels(grads, context)
            return
        tensors = list(grads.values())
        flat = flatten(tensors)
        parts = split_like(flat, tensors)
        (scales,) = yield [AllGather(self._scales(parts))]
        s = context.verdict.poison(scales.amax(0))
        foreach_mul_(parts, list(s.reciprocal().nan_to_num_(0, posinf=0)))
        add_noise_(flat, make_generator(self.seed, context, grads))
        levels = flat.round_().clamp_(-1, 1).add_(1).to(torch.uint8)
        sum_over_ranks = _reduce_scatter if self.reduce_scatter else _gather_and_sum
        sums = yield from sum_over_ranks(levels, context.size)
        flat.copy_(sums).sub_(context.size)
        foreach_mul_(parts, list(s / context.size))
        unflatten(flat, tensors)

    def guards(self, grads: Grads) -> bool:
        """See `Codec`: there is no state, and a scale of NaN makes gradients NaN."""
        return True

    def _code_by_kernels(self, grads: Grads, context: ExchangeContext) -> Coding:
        entries = TernaryEntries([grad.view(-1) for grad in grads.values()])
        (scales,) = yield [AllGather(entries.scales(self.clip))]
        s = context.verdict.poison(scales.amax(0))
        (codes,) = yield [AllGather(entries.encode(s, draw_seed(self.seed, context, grads)))]
        entries.decode(codes, s)

    def _scales(self, parts: list[Tensor]) -> Tensor:
        """The largest magnitude of each tensor, but at most 2.5 σ: (layers,)."""
        largest = torch.stack([part.abs().amax() for part in parts])
        sigma = torch.stack([torch.linalg.vector_norm(part) / part.numel() ** 0.5 for part in parts])
        return torch.minimum(largest, self.clip * sigma)


def _gather_and_sum(levels: Tensor, ranks: int) -> Generator[Sequence[Request], list[Tensor], Tensor]:
    """Sum levels (n,) from 0 to 2 over the ranks: gather all, and sum on every rank."""
    (theirs,) = yield [AllGather(pack(levels[None], 2)[0])]
    sums = levels.new_zeros(len(levels), dtype=_counter_dtype(ranks))
    for packed in theirs:
        sums += unpack(packed[None], 2, len(levels))[0]
    return sums


def _reduce_scatter(levels: Tensor, ranks: int) -> Generator[Sequence[Request], list[Tensor], Tensor]:
    """The same sums; each rank sums one shard of the entries, and the sums are gathered."""
    rows = F.pad(levels, (0, -len(levels) % ranks)).view(ranks, -1)
    (theirs,) = yield [AllToAll(pack(rows, 2))]
    shard = unpack(theirs, 2, rows.shape[1]).sum(0, dtype=_counter_dtype(ranks))
    bits = (2 * ranks).bit_length()
    (sums,) = yield [AllGather(pack(shard[None], bits)[0])]
    return unpack(sums, bits, rows.shape[1]).flatten()[: len(levels)]


def _counter_dtype(ranks: int) -> torch.dtype:
    return torch.uint8 if 2 * ranks < 256 else torch.int16
