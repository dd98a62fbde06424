"""Routes an exchange over the mesh of ranks: flat over all ranks, or hierarchical.

The hierarchical route is the 2D torus (Mikami et al., arXiv 1811.05233) with the codec between hosts only (HiTopKComm,
Shi et al., MLSys 2021): a reduce-scatter between the ranks of a host, the codec between hosts for each rank's shard of
the rows, then an all-gather between the ranks of a host. Slow links between hosts therefore carry only compressed
gradients, once per host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring._torch import all_gather_single, foreach_copy_, reduce_scatter_single
from shoestring.comm.codecs.codec import Codec, Grads, Mean
from shoestring.comm.exchange.wire import Stages, Wire, exhaust, naming_failures
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.trace import span
from shoestring.core.world import World


class Route:
    """Runs exchanges over some axes of the mesh.

    Args:
        torus: run the codec between hosts only; has no effect unless there are several hosts with several ranks each.
        sharded: whether each rank of a host holds a shard of the gradients, so that codecs need sums over the shards.
    """

    def __init__(self, world: World, axes: Sequence[str], *, torus: bool = False, sharded: bool = False) -> None:
        torus = torus and len(axes) == 2 and min(world.ranks_over([axis]) for axis in axes) > 1
        self.outer = Wire(world.group([HOSTS] if torus else axes), world.device)
        self.inner = Wire(world.group([LOCAL]), world.device) if torus else None
        self.shards = Wire(world.group([LOCAL]), world.device) if sharded else self.inner

    @property
    def sent(self) -> int:
        return self.outer.sent

    @property
    def size(self) -> int:
        """Number of ranks between which the codec runs."""
        return self.outer.size

    @property
    def timeout(self) -> float:
        """Timeout of a collective in seconds."""
        return self.outer.timeout

    def close(self) -> None:
        self.outer.close()
        if self.shards is not None:
            self.shards.close()

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """See `ExchangeContext.sum_over_shards`."""
        if self.shards is None:
            return tensor
        (mean,) = self.shards.start([Mean(tensor.clone())])()
        return mean * self.shards.size

    @property
    def overlaps(self) -> bool:
        """Whether an exchange may begin while the previous exchange waits for its last collectives; true if a single
        process group runs all collectives."""
        return self.shards is None

    def run(
        self, codec: Codec, grads: Grads, step: int, keep: Callable[[list[Tensor]], object] | None = None
    ) -> bool | Tensor:
        """See `Wire.run`."""
        return exhaust(self.stages(codec, grads, step, keep))

    def stages(
        self, codec: Codec, grads: Grads, step: int, keep: Callable[[list[Tensor]], object] | None = None
    ) -> Stages:
        """See `Wire.stages`."""
        if self.inner is None:
            return (yield from self.outer.stages(codec, grads, step, self.sum_over_shards, keep))
        with (
            span("reduce-scatter", "wire"),
            naming_failures(f"reduce-scatter between the {self.inner.size} ranks of a host"),
        ):
            own_rows = reduce_scatter_rows(self.inner, list(grads.values()))
        shares = dict(zip(grads, own_rows, strict=True))
        finite = yield from self.outer.stages(codec, shares, step, self.sum_over_shards)
        with span("all-gather", "wire"), naming_failures(f"all-gather between the {self.inner.size} ranks of a host"):
            all_gather_rows(self.inner, own_rows, list(grads.values()))
        return finite

    def own(self, tensor: Tensor) -> Tensor:
        """The shard of a tensor that this rank's codec processes."""
        return tensor if self.inner is None else _blocks(tensor, self.inner.size)[self.inner.rank]


def reduce_scatter_rows(wire: Wire, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Average over the wire's ranks by a reduce-scatter, after which rank r holds row block r of every tensor.

    Shapes: (n, …) becomes (ceil(n / ranks), …); the last block is padded with zeros.
    """
    blocks = [_blocks(tensor, wire.size) for tensor in tensors]
    whole = torch.cat([block.flatten(1) for block in blocks], dim=1)
    own = whole.new_empty(whole.shape[1])
    reduce_scatter_single(own, whole.view(-1), group=wire.group)
    own.div_(wire.size)  # the collective returns sums
    parts = own.split([block[0].numel() for block in blocks])
    return [part.view(block.shape[1:]) for part, block in zip(parts, blocks, strict=True)]


def all_gather_rows(wire: Wire, own_rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """All-gather the rows of every rank into `tensors`; the inverse of `reduce_scatter_rows`."""
    flat = torch.cat([part.reshape(-1) for part in own_rows])
    whole = flat.new_empty(wire.size, flat.numel())
    all_gather_single(whole.view(-1), flat, group=wire.group)
    parts = whole.split([part.numel() for part in own_rows], dim=1)
    rows = [
        part.reshape(-1, *block.shape[1:])[: tensor.shape[0] if tensor.ndim else 1].view(tensor.shape)
        for part, block, tensor in zip(parts, own_rows, tensors, strict=True)
    ]
    foreach_copy_(list(tensors), rows)


def _blocks(tensor: Tensor, count: int) -> Tensor:
    """Split (n, …) into blocks (count, ceil(n / count), …), padded with zeros."""
    tensor = tensor if tensor.ndim else tensor.view(1)
    missing = -len(tensor) % count
    padded = F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing)) if missing else tensor
    return padded.unflatten(0, (count, -1))
