"""Top-k sparsification with error feedback (Aji and Heafield 2017; Stich et al., NeurIPS 2018).

The selected entries are sent by one all-gather: values as fp32, bf16 or a few bits, and indices in Elias-Fano code. The
number of entries depends only on the sizes of gradients. Selection by a threshold from a sample is from Deep Gradient
Compression (Lin et al., ICLR 2018). Selection by counting is MSTopK (Shi et al., MLSys 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoestring.comm.codecs import fused
from shoestring.comm.codecs.bits import decode_indices, encode_indices, pack, unpack
from shoestring.comm.codecs.codec import AllGather, Coding, ExchangeContext, Grads, Request
from shoestring.comm.codecs.flat import FlatCodec, count_entries, poison
from shoestring.comm.codecs.fused import WeightedSum, keep_largest

Selection = Literal["exact", "sampled", "mstopk"]
WireType = Literal["fp32", "bf16", "int8", "int4", "int2"]

RANK = 128  # expected number of sampled magnitudes above the threshold
SAMPLES = 2**17  # maximum number of entries in a sample
BLOCK = 2**17  # entries compared at once, so that values and magnitudes fit the cache
BUCKET = 512  # number of values quantised with the same smallest and largest magnitude
BISECTIONS = 30  # maximum number of bisections in MSTopK's search for a threshold


class SparseCodec(FlatCodec):
    """Base class of codecs that send only selected entries. State: "residual".

    Args:
        density: fraction of entries selected; at least one entry is selected.
        selection: "exact" selects the k largest magnitudes. "sampled" estimates a threshold from a sample, and selects
            k of the entries above it, or the k largest if more than 1.3 k entries are above it. "mstopk" searches for
            the lowest threshold with at most k entries above it, and adds some of the next largest entries up to k.
        wire: data type of the values on the wire; the rounding error is added to the residual.
        per_layer: select in each parameter separately, not over all parameters together.
    """

    stages = 1

    def __init__(
        self, density: float, *, selection: Selection = "exact", wire: WireType = "fp32", per_layer: bool = False
    ) -> None:
        super().__init__()
        self.density, self.per_layer, self.reads_in_place = density, per_layer, not per_layer
        self.selection: Selection = selection
        self.wire: WireType = wire

    def select(self, terms: WeightedSum, sizes: Sequence[int], density: float) -> tuple[Tensor, Tensor]:
        """Build M, the sum of `terms`, in `terms.g`, and select the entries of M to send.

        Args:
            sizes: number of entries of each parameter; used only with `per_layer`.

        Returns:
            Ascending indices (k,), and values (k,), which are non-finite if any entry of M is non-finite. k is the same
            on all ranks.
        """
        if not self.per_layer:
            return select_entries(terms, count_entries(len(terms), density), self.selection)
        start, indices, values = 0, [], []
        for size in filter(None, sizes):
            chosen, taken = select_entries(
                terms.part(slice(start, start + size)), count_entries(size, density), self.selection
            )
            indices.append(chosen + start)
            values.append(taken)
            start += size
        return torch.cat(indices), torch.cat(values)

    def encode(self, indices: Tensor, values: Tensor, n: int) -> tuple[list[Request], Tensor]:
        """Encode k of n entries; returns the requests, and the values (k,) that the other ranks will decode."""
        coded = encode_values(values, self.wire)
        sent = (
            values if self.wire == "fp32" else decode_values([tensor[None] for tensor in coded], self.wire, len(values))
        )
        return [AllGather(tensor) for tensor in (encode_indices(indices[None], n)[0], *coded)], sent.view(-1)

    def decode(self, answers: Sequence[Tensor], k: int, n: int) -> tuple[Tensor, Tensor]:
        """Decode the entries of all ranks; returns indices below n, and values divided by the number of ranks, both
        (ranks, k)."""
        values = decode_values(answers[1:], self.wire, k)
        return decode_indices(answers[0], k, n), values / len(values)


class TopKCodec(SparseCodec):
    """Sends the largest entries of gradient plus residual. See `SparseCodec` for the arguments."""

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        sizes = [grad.numel() for grad in grads.values()]
        if not sum(sizes):
            return
        e = self.flat_state("residual", grads)
        terms = self.weigh(grads, e)
        indices, values = self.select(terms, sizes, self.density)
        M = terms.g
        requests, sent = self.encode(indices, values, len(M))
        answers = yield requests
        M[indices] = values - sent
        self.replace_state("residual", grads, M)
        self.deliver(grads, terms.table, *self.decode(answers, len(indices), len(M)), out=e)


def select_entries(terms: WeightedSum, k: int, selection: Selection) -> tuple[Tensor, Tensor]:
    """Build M, the sum of `terms`, in `terms.g`, and select k of its entries, by the one-pass kernel if available;
    returns ascending indices (k,) and values (k,)."""
    n = len(terms)
    if selection != "mstopk" and 4 * k <= n and fused.is_available(terms.g.device):
        exact = selection == "exact"
        # For an exact selection, a threshold that is too low costs little; one that is too high costs another pass.
        threshold, _ = estimate_thresholds(terms.sample(_stride(n, k)).abs(), n, k, sigmas=4 if exact else 1.5)
        if exact:
            threshold = threshold.nextafter(threshold.new_zeros(()))  # include entries equal to the threshold
        if picked := fused.pick_entries(terms, k, threshold, largest=exact):
            return picked
        M = terms.g
    else:
        M = terms.build()
    indices = SELECTIONS[selection](M, k)
    return indices, M[indices] + poison(M)


# -- selection: ascending indices (k,) of x (n,) ------------------------------------------------------------------


def select_exact(x: Tensor, k: int) -> Tensor:
    """Select the k largest magnitudes; of equal magnitudes, the first ones."""
    if x.is_cuda or 4 * k > len(x):
        return keep_largest(x, k)
    hits = _candidates(x, k)
    return hits[keep_largest(x[hits], k)]


def select_sampled(x: Tensor, k: int) -> Tensor:
    """Select k evenly spaced entries of those above a sampled threshold; if more than 1.3 k entries are above it,
    select the k largest."""
    if 4 * k > len(x):
        return select_exact(x, k)
    hits = _candidates(x, k)
    if len(hits) > 1.3 * k:
        return hits[keep_largest(x[hits], k)]
    return hits[torch.arange(k, device=x.device) * len(hits) // k]


def select_mstopk(x: Tensor, k: int) -> Tensor:
    """Select about the k largest magnitudes, by MSTopK's bisection for a threshold between the mean and the maximum."""
    a = x.abs()
    low, high = float(a.mean()), float(a.amax())
    certain, rest = indices_above(x, high), None
    for _ in range(BISECTIONS):
        threshold = (low + high) / 2
        if not low < threshold < high:
            break
        hits = indices_above(x, threshold) if rest is None else rest[a[rest] > threshold]
        if len(hits) > k:
            low, rest = threshold, hits
        else:
            high, certain = threshold, hits
        if len(hits) == k:
            return hits
    if rest is None:  # fewer than k magnitudes are above the mean
        return select_exact(x, k)
    next_ones = rest[a[rest] <= high][: k - len(certain)]
    return torch.cat([certain, next_ones]).sort().values


SELECTIONS: dict[Selection, Callable[[Tensor, int], Tensor]] = {
    "exact": select_exact,
    "sampled": select_sampled,
    "mstopk": select_mstopk,
}


def indices_above(x: Tensor, threshold: float) -> Tensor:
    """Ascending indices of the entries whose magnitude is above the threshold."""
    if x.is_cuda:
        return (x.abs() > threshold).nonzero().view(-1)
    # Numpy is used because torch's comparison and `nonzero` are 3 and 6 times slower on the CPU.
    blocks = (x[start : start + BLOCK].numpy() for start in range(0, len(x), BLOCK))
    above = [np.flatnonzero(np.abs(block) > threshold) + at * BLOCK for at, block in enumerate(blocks)]
    return torch.from_numpy(np.concatenate(above))


def _candidates(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest magnitudes and a few more, found by a threshold estimated from a sample."""
    likely, surer = estimate_thresholds(x[:: _stride(len(x), k)].abs(), len(x), k)
    hits = indices_above(x, float(likely))
    for threshold in (float(surer), 0.0):
        if len(hits) >= k:
            return hits
        hits = indices_above(x, threshold)
    if len(hits) >= k:
        return hits
    # Fewer than k entries are nonzero, so the first zeros are taken too.
    free = torch.ones(k, dtype=torch.bool, device=hits.device)
    free[hits[hits < k]] = False
    return torch.cat([hits, free.nonzero().view(-1)[: k - len(hits)]]).sort().values


def _stride(n: int, k: int) -> int:
    """Stride of the sample from which a threshold for k of n entries is estimated; odd, so that the sample covers all
    columns of a matrix whose row length is a power of 2."""
    return max(1, k // RANK, n // SAMPLES) | 1


def estimate_thresholds(sample: Tensor, n: int, k: int, sigmas: float = 1.5) -> tuple[Tensor, Tensor]:
    """Estimate two thresholds from a sample: at least k of n magnitudes are likely above the first, and very likely
    above the second.

    The first threshold is `sigmas` standard deviations below the estimated k-th largest magnitude. Both thresholds are
    scalars on the sample's device.
    """
    rank = k / n * len(sample)  # expected position of the k-th largest magnitude in the sorted sample
    ordered = sample.topk(min(len(sample), 2 * int(rank) + 16)).values
    return ordered[min(len(ordered) - 1, int(rank + sigmas * rank**0.5))], ordered[-1]


# -- values on the wire ---------------------------------------------------------------------------------------------


def encode_values(values: Tensor, form: WireType) -> list[Tensor]:
    """Encode values (k,) as the tensors to all-gather.

    Integer codes hold the sign, and a level between the smallest and the largest magnitude of the bucket. Zero need not
    be a level, because no selected value is near zero. The rounding error is smaller than the value itself.
    """
    if form in ("fp32", "bf16"):
        return [values.to(torch.bfloat16 if form == "bf16" else torch.float32)]
    bits = int(form.removeprefix("int"))
    missing = -len(values) % BUCKET
    v = torch.cat([values, values[-1:].expand(missing)]).view(-1, BUCKET)
    low, high = v.abs().aminmax(dim=1, keepdim=True)
    step = (high - low) / (2 ** (bits - 1) - 1)
    level = ((v.abs() - low) * step.reciprocal().nan_to_num_(posinf=0)).round_().clamp_(0, 2 ** (bits - 1) - 1)
    codes = level.nan_to_num_().to(torch.uint8) | (v < 0).to(torch.uint8) << bits - 1
    return [torch.cat([low, step], dim=1), pack(codes.view(1, -1)[:, : len(values)], bits)[0]]


def decode_values(coded: Sequence[Tensor], form: WireType, k: int) -> Tensor:
    """The inverse of `encode_values` for all ranks: (ranks, k) in fp32."""
    if form in ("fp32", "bf16"):
        return coded[0].float()
    scales, packed = coded
    bits = int(form.removeprefix("int"))
    codes = unpack(packed, bits, k)
    low, step = scales.repeat_interleave(BUCKET, dim=1)[:, :k].unbind(2)
    magnitude = low + step * (codes & 2 ** (bits - 1) - 1)
    return torch.where(codes >= 2 ** (bits - 1), -magnitude, magnitude)
