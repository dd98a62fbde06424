"""Selection by a threshold and error feedback in one pass over memory, on devices that Triton compiles for.

Gradient and residual are read once, and the next residual is written once; what is over the threshold comes out
beside it. By torch's own operations, memory is read and written more than three times as often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 2048  # entries of one program


@dataclass(frozen=True)
class Sum:
    """M = scale g + e + momentum u, of flat fp32 tensors (n,). It is built in the place of `g`; `e` and `u` stay."""

    g: Tensor
    e: Tensor
    u: Tensor | None = None
    scale: float = 1.0
    momentum: float = 0.0

    def __len__(self) -> int:
        return len(self.g)

    def part(self, some: slice) -> Sum:
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

    def put_back(self, M: Tensor) -> Tensor:
        M[self.indices] = self.values
        return M


Take = Callable[[Sum, Tensor, int], Taken]


def available(device: torch.device) -> bool:
    """Whether `take` works on this device."""
    return device.type == "cuda" and find_spec("triton") is not None


def take(terms: Sum, threshold: Tensor, capacity: int) -> Taken:
    """Take what of M is over the threshold (a scalar on the device), at most `capacity` entries; the rest is in `g`."""
    launched = launch(terms, threshold, capacity)
    return gathered(*launched, capacity)


def launch(terms: Sum, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Start the kernel; returns its indices and values, unordered, their count, and what tells of numbers not finite."""
    from shoestring.comm.fused_kernel import split

    g, n = terms.g, len(terms)
    blocks = -(-n // BLOCK)
    indices = torch.empty(capacity, dtype=torch.int64, device=g.device)
    values, tell = g.new_empty(capacity), g.new_empty(blocks)
    count = torch.zeros(1, dtype=torch.int32, device=g.device)
    u = terms.e if terms.u is None else terms.u
    numbers = (n, terms.scale, terms.momentum, capacity)
    out = (indices, values, count, tell)
    split[(blocks,)](g, terms.e, u, threshold.view(1), *numbers, *out, MOMENTUM=terms.u is not None, BLOCK=BLOCK)
    return out


def gathered(indices: Tensor, values: Tensor, count: Tensor, tell: Tensor, capacity: int) -> Taken:
    """What the kernel found, in ascending order; waits for the device."""
    found = int(count)
    indices, order = indices[: min(found, capacity)].sort()
    return Taken(indices, values[order], found <= capacity, tell.sum())


def take_by_torch(terms: Sum, threshold: Tensor, capacity: int) -> Taken:
    """What `take` does, on any device; where there is not room for all, it takes the first."""
    M = terms.built()
    tell = 0 * M.sum()
    hits = (M.abs() > threshold).nonzero().view(-1)
    indices = hits[:capacity]
    values = M[indices]
    M[indices] = 0
    return Taken(indices, values, len(hits) <= capacity, tell)
