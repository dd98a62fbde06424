"""Selection by a threshold and error feedback in one pass over memory, on devices that Triton compiles for.

The kernel reads gradient and residual once, and writes the new residual and the entries above the threshold once.
Torch's own operations read and write memory more than three times as often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 2048  # entries that one program processes


@dataclass(frozen=True)
class WeightedSum:
    """M = scale g + e + momentum u, of flat fp32 tensors (n,). It is built in place of `g`; `e` and `u` stay."""

    g: Tensor
    e: Tensor
    u: Tensor | None = None
    scale: float = 1.0
    momentum: float = 0.0

    def __len__(self) -> int:
        return len(self.g)

    def part(self, some: slice) -> WeightedSum:
        """The same sum of some of the entries."""
        return replace(self, g=self.g[some], e=self.e[some], u=None if self.u is None else self.u[some])

    def build(self) -> Tensor:
        """Build M in place of `g`."""
        if self.scale != 1:
            self.g.mul_(self.scale)
        self.g.add_(self.e)
        return self.g if self.u is None else self.g.add_(self.u, alpha=self.momentum)

    def sample(self, stride: int) -> Tensor:
        """Build every stride-th entry of M; `g` is unchanged."""
        return replace(self.part(slice(None, None, stride)), g=self.g[::stride].clone()).build()


@dataclass(frozen=True)
class Taken:
    """Entries above a threshold that were taken out of M, where they are zero now."""

    indices: Tensor  # (count,) int64, ascending
    values: Tensor  # (count,)
    complete: bool  # whether all entries above the threshold fit
    poison: Tensor  # 0; NaN if an entry of M was not finite

    def put_back(self, M: Tensor) -> None:
        M[self.indices] = self.values


def is_available(device: torch.device) -> bool:
    """Whether `take` works on this device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def pick_entries(terms: WeightedSum, k: int, threshold: Tensor, *, largest: bool) -> tuple[Tensor, Tensor] | None:
    """Pick k entries of M above a threshold, a scalar on the device, and build M in `terms.g`.

    Args:
        largest: pick the k largest; otherwise do so only if far more than k are above the threshold, and pick k evenly
            spread ones if not.

    Returns:
        Ascending indices, and values, NaN if M is not finite; None where fewer than k entries are above the threshold,
        or too many to fit.
    """
    taken = take_entries(terms, threshold, 2 * k)
    count = len(taken.indices)
    taken.put_back(terms.g)
    if count < k or not taken.complete:
        return None
    if largest or count > 1.3 * k:
        which = taken.values.abs().topk(k, sorted=False).indices.sort().values
    else:
        which = torch.arange(k, device=threshold.device) * count // k
    return taken.indices[which], taken.values[which] + taken.poison


def take_entries(terms: WeightedSum, threshold: Tensor, room: int) -> Taken:
    """Take the entries of M above the threshold, at most `room`; the remainder of M is in `terms.g`."""
    indices, values, count, poison = launch_split(terms, threshold, room)
    above = int(count)  # waits for the device
    indices, order = indices[: min(above, room)].sort()
    return Taken(indices, values[order], above <= room, poison.sum())


def launch_split(terms: WeightedSum, threshold: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel.

    Returns:
        Indices and values in any order; the number of entries above the threshold; zeros, or NaN if M is not finite.
    """
    from shoestring.comm.codecs.fused_kernel import split

    g, blocks = terms.g, -(-len(terms) // BLOCK)
    indices, values = torch.empty(room, dtype=torch.int64, device=g.device), g.new_empty(room)
    count, poison = torch.zeros(1, dtype=torch.int32, device=g.device), g.new_empty(blocks)
    u = g if terms.u is None else terms.u
    inputs = (g, terms.e, u, threshold.view(1), len(terms), terms.scale, terms.momentum, room)
    outputs, kernel = (indices, values, count, poison), split[(blocks,)]
    kernel(*inputs, *outputs, MOMENTUM=terms.u is not None, BLOCK=BLOCK)
    return outputs
