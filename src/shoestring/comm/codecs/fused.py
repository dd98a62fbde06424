"""Selection by a threshold and error feedback in one pass over memory, on devices that Triton compiles for.

Gradient and residual are read once, and the next residual is written once; what is over the threshold comes out
beside it. By torch's own operations, memory is read and written more than three times as often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 2048  # entries of one program


@dataclass(frozen=True)
class WeightedSum:
    """M = scale g + e + momentum u, of flat fp32 tensors (n,). It is built in the place of `g`; `e` and `u` stay."""

    g: Tensor
    e: Tensor
    u: Tensor | None = None
    scale: float = 1.0
    momentum: float = 0.0

    def __len__(self) -> int:
        return len(self.g)

    def part(self, some: slice) -> WeightedSum:
        """The same of some of the entries."""
        return replace(self, g=self.g[some], e=self.e[some], u=None if self.u is None else self.u[some])

    def built(self) -> Tensor:
        """M, in the place of `g`."""
        if self.scale != 1:
            self.g.mul_(self.scale)
        self.g.add_(self.e)
        return self.g if self.u is None else self.g.add_(self.u, alpha=self.momentum)

    def sampled(self, stride: int) -> Tensor:
        """Every stride-th entry of M; `g` stays."""
        return replace(self.part(slice(None, None, stride)), g=self.g[::stride].clone()).built()


@dataclass(frozen=True)
class Taken:
    """Entries over a threshold, taken out of M, which are zero there now."""

    indices: Tensor  # (count,) int64, ascending
    values: Tensor  # (count,)
    complete: bool  # whether there was room for all of them
    tell: Tensor  # 0; NaN if an entry of M was not finite

    def put_back(self, M: Tensor) -> None:
        M[self.indices] = self.values


def is_available(device: torch.device) -> bool:
    """Whether `take` works on this device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def pick_entries(terms: WeightedSum, k: int, threshold: Tensor, *, largest: bool) -> tuple[Tensor, Tensor] | None:
    """k entries of M over a threshold, a scalar on the device: indices, ascending, and values, NaN if M is not finite.

    M is in `terms.g` then. None where fewer than k are over the threshold, or far more.

    Args:
        largest: the k largest; otherwise those only if many are over the threshold, and k evenly spread if few are.
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
    return taken.indices[which], taken.values[which] + taken.tell


def take_entries(terms: WeightedSum, threshold: Tensor, room: int) -> Taken:
    """Take what of M is over the threshold, at most `room` entries; what is left of M is in `terms.g`."""
    indices, values, count, tell = launch_split(terms, threshold, room)
    found = int(count)  # waits for the device
    indices, order = indices[: min(found, room)].sort()
    return Taken(indices, values[order], found <= room, tell.sum())


def launch_split(terms: WeightedSum, threshold: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Start the kernel: indices and values in any order, how many are over the threshold, and what is NaN if M is."""
    from shoestring.comm.codecs.fused_kernel import split

    g, blocks = terms.g, -(-len(terms) // BLOCK)
    indices, values = torch.empty(room, dtype=torch.int64, device=g.device), g.new_empty(room)
    count, tell = torch.zeros(1, dtype=torch.int32, device=g.device), g.new_empty(blocks)
    u = g if terms.u is None else terms.u
    inputs = (g, terms.e, u, threshold.view(1), len(terms), terms.scale, terms.momentum, room)
    outputs, kernel = (indices, values, count, tell), split[(blocks,)]  # pyright: ignore[reportIndexIssue]
    kernel(*inputs, *outputs, MOMENTUM=terms.u is not None, BLOCK=BLOCK)
    return outputs
