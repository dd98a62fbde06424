"""Selects entries by a threshold and applies error feedback in one pass over memory, on devices with Triton.

The kernel reads gradient and residual once, and writes their sum and one bit per entry. An entry's bit says whether the
entry is above the threshold; a second kernel collects the entries above the threshold. Torch's own operations read and
write memory more than three times as often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoestring.comm.codecs.grad_table import GradTable, has_kernels


@dataclass(frozen=True)
class WeightedSum:
    """M = scale g + e + momentum u, in fp32 (n,). M is built in `g`; `e` and `u` are unchanged."""

    g: Tensor
    e: Tensor
    u: Tensor | None = None
    scale: float = 1.0
    momentum: float = 0.0
    table: GradTable | None = None
    """Table of the gradients in memory; None once the gradients have been copied into `g`."""

    def __len__(self) -> int:
        return len(self.g)

    def part(self, some: slice) -> WeightedSum:
        """The same sum for a slice of the entries; the gradients must already be in `g`."""
        assert self.table is None
        return replace(self, g=self.g[some], e=self.e[some], u=None if self.u is None else self.u[some])

    def build(self) -> Tensor:
        """Build M in `g`, and return it."""
        if self.table is not None:
            self.table.read_into(self.g)
        if self.scale != 1:
            self.g.mul_(self.scale)
        self.g.add_(self.e)
        return self.g if self.u is None else self.g.add_(self.u, alpha=self.momentum)

    def sample(self, stride: int) -> Tensor:
        """Build every stride-th entry of M; `g` is unchanged."""
        if self.table is not None:
            return self.table.sample(stride, self.e, self.u, self.scale, self.momentum)
        return replace(self.part(slice(None, None, stride)), g=self.g[::stride].clone()).build()


@dataclass(frozen=True)
class Taken:
    """The entries of M whose magnitude is above a threshold."""

    indices: Tensor  # (count,) int64, ascending
    values: Tensor  # (count,)
    complete: bool  # whether `take_entries` had enough `room`; if not, both tensors are empty
    poison: Tensor  # 0, or NaN if an entry of M was not finite


def is_available(device: torch.device) -> bool:
    """Whether `take_entries` works on this device."""
    return has_kernels(device)


def pick_entries(terms: WeightedSum, k: int, threshold: Tensor, *, largest: bool) -> tuple[Tensor, Tensor] | None:
    """Build M in `terms.g`, and pick k of its entries above a threshold (a scalar on the device).

    Args:
        largest: always pick the k largest entries. If false, pick the k largest only if more than 1.3 k entries are
            above the threshold; otherwise pick k evenly spaced entries of those above it.

    Returns:
        Ascending indices, and values (all NaN if any entry of M is not finite). None if fewer than k entries are above
        the threshold, or too many to collect.
    """
    taken = take_entries(terms, threshold, 4 * k + 64 if largest else 2 * k)
    count = len(taken.indices)
    if count < k or not taken.complete:
        return None
    if largest or count > 1.3 * k:
        which = keep_largest(taken.values, k)
    else:
        which = torch.arange(k, device=threshold.device) * count // k
    return taken.indices[which], taken.values[which] + taken.poison


def keep_largest(values: Tensor, k: int) -> Tensor:
    """Ascending positions (k,) of the k largest magnitudes; of equal magnitudes, the first ones."""
    sizes = values.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)  # comparisons with NaN are false
    least = sizes.topk(k, sorted=False).values.amin()
    places = (sizes >= least).nonzero().view(-1)
    larger = sizes[places] > least
    return places[larger | ((~larger).cumsum(0) <= k - larger.sum())]


def take_entries(terms: WeightedSum, threshold: Tensor, room: int) -> Taken:
    """Build M in `terms.g`, and collect its entries above the threshold; collect none if there are more than `room`."""
    table = terms.table or GradTable([terms.g])
    bits, counts, poison = table.split(terms.g, terms.e, terms.u, threshold.view(1), terms.scale, terms.momentum)
    ends = counts.cumsum(0)
    above = int(ends[-1])  # waits for the device
    indices, values = table.collect(terms.g, bits, ends, above if above <= room else 0)
    return Taken(indices, values, above <= room, poison.sum())
