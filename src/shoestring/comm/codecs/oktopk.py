"""Ok-Topk: the top k of the sum, by a sparse reduce-scatter and all-gather (Li and Hoefler, PPoPP 2022).

Every rank owns a region of the flat gradient. Each rank sends every owner its selected entries of that region. The
owner sums them, and an all-gather brings the owners' largest sums to all. A rank sends less than 6 k (P - 1) / P words,
however many ranks P there are, while the all-gather of `TopKCodec` grows with P.
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
from shoestring.comm.codecs.fused import keep_largest
from shoestring.comm.codecs.topk import (
    FlatCodec,
    count_entries,
    select_entries,
    select_of_few,
    sum_entries,
)


class OkTopKCodec(FlatCodec):
    """The k largest of the sums of what the ranks selected, k / P of each region.

    The paper balances regions by gathering counts from time to time. Here all ranks know the indices of the last sums,
    and set the next step's regions by their number in each parameter.

    State: "residual", cleared only where a rank's selection and the selected sums overlap; it also takes the rounding
    error. "hits": a decaying count of selected sums in each parameter.

    Args:
        slack: capacity of a message as a multiple of k / P entries; the smallest entries beyond it go to the residual.
        wire: data type of the values on the wire.
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
        e = self.flat_state("residual", grads)
        terms = self.weigh(grads, e)
        M = terms.g
        hits = [self.get_state("hits", name, M.new_empty(())) for name in grads]
        bounds = balance_regions([int(count) for count in torch.stack(hits).tolist()], sizes, context.size)
        chosen, values = select_entries(terms, k, "exact")  # builds M = g + e
        where, what = _rows(chosen, values, bounds, room)
        sent = (what + 0 * values[0]).to(self.dtype)  # padding too tells whether M is finite
        mine, theirs = yield [AllToAll(encode_indices(where, n)), AllToAll(sent)]

        start = min(bounds[context.rank], n - share)
        end = max(bounds[context.rank + 1], start + share)
        # All received entries are in this region, but for the zeros that pad a message, and where peers are rehearsed.
        received = decode_indices(mine, room, n).sub_(start).remainder_(end - start)
        received = _spread(received, theirs, end - start)
        total = sum_entries(received, theirs.float(), out=M.new_empty(end - start))
        best = select_of_few(total, share)
        largest, sums = best + start, total[best]
        rounded = sums.to(self.dtype)
        answers = yield [AllGather(encode_indices(largest[None], n)[0]), AllGather(rounded)]

        indices, values = decode_indices(answers[0], share, n), answers[1].float()
        delivered = _spread(where, sent, n).flatten()
        e.index_fill_(0, delivered, 0)
        self.deliver(grads, terms.table, indices, values / context.size, out=e)  # the average is in e, here at least
        M.index_add_(0, delivered, sent.float().flatten() * (e[delivered] != 0), alpha=-1)
        M.index_add_(0, largest, (sums - rounded.float()) * (rounded != 0))
        self.replace_state("residual", grads, M)
        self._count_hits(grads, hits, sizes, indices, values)

    def _count_hits(
        self, grads: Grads, hits: list[Tensor], sizes: Sequence[int], indices: Tensor, values: Tensor
    ) -> None:
        """Add to the halved counts; they stay whole numbers, so that regions are equal on all ranks."""
        ends = torch.tensor(list(accumulate(sizes)), device=indices.device).expand(len(indices), -1)
        upto = F.pad((values != 0).cumsum(1), (1, 0)).gather(1, torch.searchsorted(indices, ends.contiguous()))
        now = upto.sum(0).diff(prepend=upto.new_zeros(1))
        self.state["hits"].update(zip(grads, torch.stack(hits).div_(2).floor_().add_(now).unbind(), strict=True))


def balance_regions(hits: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    """The starts of the ranks' regions, and the end, with about the same number of hits in each.

    Hits count as evenly spread over their parameter. Every entry has a small weight of its own, so that regions without
    hits are bounded.
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


def _rows(indices: Tensor, values: Tensor, bounds: list[int], room: int) -> tuple[Tensor, Tensor]:
    """Entries by region: ascending indices (k,) and values as (ranks, room) each, padded with zeros."""
    edges = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
    where, what = [], []
    for rank, (start, end) in enumerate(pairwise(edges)):
        part, own = indices[start:end], values[start:end]
        if len(part) > room:
            kept = keep_largest(own, room)
            part, own = part[kept], own[kept]
        where.append(F.pad(part, (0, room - len(part)), value=max(bounds[rank + 1] - 1, 0)))
        what.append(F.pad(own, (0, room - len(own))))
    return torch.stack(where), torch.stack(what)


def _spread(indices: Tensor, values: Tensor, n: int) -> Tensor:
    """The indices; of zeros any others below n that are distinct: those that pad a message are all the same, and a GPU
    would add them one after the other."""
    others = torch.arange(indices.numel(), device=indices.device).view_as(indices) % n
    return torch.where(values != 0, indices, others)
