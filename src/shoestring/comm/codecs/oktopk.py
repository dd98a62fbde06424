"""Ok-Topk: top-k of the sum, reduced by owners (Li and Hoefler, PPoPP 2022).

Every rank owns a region of the flat gradient. Each sends every owner what it selected of that region; the owner sums,
and all gather the owners' largest sums. A rank sends less than 6 k (P - 1) / P words, however many ranks P there are,
where the gather of `topk.TopK` grows with them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.comm.codecs.bits import decode_indices, encode_indices
from shoestring.comm.codecs.codec import AllGather, AllToAll, Coding, ExchangeContext, Grads
from shoestring.comm.codecs.topk import FlatCodec, count_entries, keep_largest, select_exact, sum_entries


class OkTopKCodec(FlatCodec):
    """The k largest of the sums of what the ranks selected, k / P of each region.

    The paper balances regions by gathering counts now and then; here all ranks know the indices of the last sums, and
    draw the boundaries for the next step from how many fell into each parameter.

    State: "residual", cleared only where a rank's own selection and the sums' meet; it also takes what rounding takes.
    "hits": how often each parameter was in the sums, lately.

    Args:
        slack: a message has room for this many times k / P entries; the smallest of what is over wait in the residual.
        dtype: of values on the wire.
    """

    stages = 2
    shared = frozenset({"hits"})

    def __init__(self, density: float, *, slack: float = 1.25, wire: Literal["fp32", "bf16"] = "fp32") -> None:
        super().__init__()
        self.density, self.slack = density, slack
        self.dtype = torch.bfloat16 if wire == "bf16" else torch.float32

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        sizes = [grad.numel() for grad in grads.values()]
        n = sum(sizes)
        if not n:
            return
        k = count_entries(n, self.density)
        room, share = min(n, math.ceil(self.slack * k / context.size)), min(n, math.ceil(k / context.size))
        e = self.flat("residual", grads)
        M = self.gathered(grads).add_(e)
        hits = [self.get_state("hits", name, M.new_empty(())) for name in grads]
        bounds = balance_regions([int(each) for each in torch.stack(hits).tolist()], sizes, context.size)
        where, what = _rows(M, select_exact(M, k), bounds, room)
        sent = (what + 0 * M.sum()).to(self.dtype)
        mine, theirs = yield [AllToAll(encode_indices(where, n)), AllToAll(sent)]

        start = min(bounds[context.rank], n - share)
        end = max(bounds[context.rank + 1], start + share)
        # All that comes lies in this region, but for the places of zeros that fill up a message.
        received = decode_indices(mine, room, n).sub_(start).clamp_(0, end - start - 1)
        total = sum_entries(received, theirs.float(), out=M.new_empty(end - start))
        best = select_exact(total, share)
        largest, sums = best + start, total[best]
        rounded = sums.to(self.dtype)
        answers = yield [AllGather(encode_indices(largest[None], n)[0]), AllGather(rounded)]

        found, values = decode_indices(answers[0], share, n), answers[1].float()
        average = sum_entries(found, values / context.size, out=e)
        delivered = where.flatten()
        M.index_add_(0, delivered, sent.float().flatten() * (average[delivered] != 0), alpha=-1)
        M.index_add_(0, largest, (sums - rounded.float()) * (rounded != 0))
        self.replace("residual", grads, M)
        self._count(grads, hits, sizes, found[values != 0])
        self.spread(grads, average)

    def _count(self, grads: Grads, hits: list[Tensor], sizes: Sequence[int], found: Tensor) -> None:
        """Halve what was counted before: whole numbers, so that boundaries are equal on all ranks."""
        ends = torch.tensor(list(accumulate(sizes)), device=found.device)
        now = torch.bucketize(found, ends, right=True).bincount(minlength=len(sizes))
        self.state["hits"].update(zip(grads, torch.stack(hits).div_(2).floor_().add_(now).unbind(), strict=True))


def balance_regions(hits: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    """The starts of the ranks' regions, and the end: about as many hits in each, if those of a parameter are even.

    Every entry counts a little, so that regions without any hit are not unbounded.
    """
    n, base = sum(sizes), sum(hits) // 16 + 1
    weights = [hit * n + base * size for hit, size in zip(hits, sizes, strict=True)]
    upto, starts = list(accumulate(weights, initial=0)), list(accumulate(sizes, initial=0))
    bounds = []
    for rank in range(ranks):
        target = rank * upto[-1] // ranks
        at = bisect_right(upto, target) - 1
        bounds.append(starts[at] + (target - upto[at]) * sizes[at] // weights[at])
    return [*bounds, n]


def _rows(M: Tensor, indices: Tensor, bounds: list[int], room: int) -> tuple[Tensor, Tensor]:
    """Ascending indices and their entries of M by region: (ranks, room) each, filled up with zeros for any entry."""
    edges = torch.searchsorted(indices, torch.tensor(bounds, device=M.device)).tolist()
    where, what = [], []
    for rank, (start, end) in enumerate(pairwise(edges)):
        part = indices[start:end]
        if len(part) > room:
            part = keep_largest(M, part, room)
        where.append(F.pad(part, (0, room - len(part)), value=max(bounds[rank + 1] - 1, 0)))
        what.append(F.pad(M[part], (0, room - len(part))))
    return torch.stack(where), torch.stack(what)
