"""Selection by a threshold and error feedback in one pass over memory, on devices that Triton compiles for.

The kernel reads gradient and residual once, and writes their sum and a bit for each entry, by which the entries above
the threshold are then collected. Torch's own operations read and write memory more than three times as often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoestring.comm.codecs.grad_table import GradTable, has_kernels


@dataclass(frozen=True)
class WeightedSum:
    """M = scale g + e + momentum u, in fp32 (n,). It is built in `g`; `e` and `u` stay."""

    g: Tensor
    e: Tensor
    u: Tensor | None = None
    scale: float = 1.0
    momentum: float = 0.0
    table: GradTable | None = None
    """Where the gradients lie, if they are not in `g` yet."""

    def __len__(self) -> int:
        return len(self.g)

    def part(self, some: slice) -> WeightedSum:
        """The same sum of some of the entries, whose gradients are in `g`."""
        assert self.table is None
        return replace(self, g=self.g[some], e=self.e[some], u=None if self.u is None else self.u[some])

    def build(self) -> Tensor:
        """Build M."""
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
    """Entries of M above a threshold."""

    indices: Tensor  # (count,) int64, ascending
    values: Tensor  # (count,)
    complete: bool  # whether there was room for them; otherwise there are none here
    poison: Tensor  # 0; NaN if an entry of M was not finite


def is_available(device: torch.device) -> bool:
    """Whether `take_entries` works on this device."""
    return has_kernels(device)


def pick_entries(terms: WeightedSum, k: int, threshold: Tensor, *, largest: bool) -> tuple[Tensor, Tensor] | None:
    """Pick k entries of M above a threshold, a scalar on the device, and build M in `terms.g`.

    Args:
        largest: pick the k largest; otherwise do so only if far more than k are above the threshold, and pick k evenly
            spread ones if not.

    Returns:
        Ascending indices, and values, NaN if M is not finite; None where fewer than k entries are above the threshold,
        or too many to fit.
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
    """Ascending places (k,) of the k largest magnitudes of some values; of equal ones, the first."""
    sizes = values.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = sizes.topk(k, sorted=False).values.amin()
    places = (sizes >= least).nonzero().view(-1)
    larger = sizes[places] > least
    return places[larger | ((~larger).cumsum(0) <= k - larger.sum())]


def take_entries(terms: WeightedSum, threshold: Tensor, room: int) -> Taken:
    """Build M in `terms.g`, and find its entries above the threshold: none of them if they are more than `room`."""
    table = terms.table or GradTable([terms.g])
    bits, counts, poison = table.split(terms.g, terms.e, terms.u, threshold.view(1), terms.scale, terms.momentum)
    ends = counts.cumsum(0)
    above = int(ends[-1])  # waits for the device
    indices, values = table.collect(terms.g, bits, ends, above if above <= room else 0)
    return Taken(indices, values, above <= room, poison.sum())
