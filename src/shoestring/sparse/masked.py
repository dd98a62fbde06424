"""Weights behind masks: computed anew every few steps, with a decay of what they leave out, and an end without them.

Every rank has all masks, one bit a weight, so that what FSDP2 gathers is masked as it arrives. Under FSDP2 each rank
computes those of its own rows, and only the bits travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.sparse import kernels
from shoestring.sparse.calibration import Search
from shoestring.sparse.masks import greedy_mask, prune, row_mask, torch_default_mask, transposable_mask
from shoestring.sparse.product import Pruned, pack, unpack
from shoestring.sparse.shards import gathered, local, own_rows

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.sparse.settings import Masked

ALL = 255  # a byte of a mask that keeps everything


def pruned(weight: Tensor, packed: Tensor) -> Tensor:
    """The weight with zeros where its packed mask has them."""
    return prune(weight, unpack(packed.to(weight.device), weight.shape[1]))


def pruned_forms(
    weight: Tensor, packed: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """See `operands.Pruning`; of a packed mask."""
    if kernels.usable(weight):
        return kernels.pruned(weight.contiguous(), packed, dtype, straight=straight, transposed=transposed)
    left = pruned(weight, packed).to(dtype)
    return left if straight else None, left.t().contiguous() if transposed else None


class Masks:
    """See `attached.SparseMethod`."""

    def __init__(self, job: Job, settings: Masked) -> None:
        self.job, self.settings, self.fp8, self.dense = job, settings, False, False
        self.masks: dict[str, Tensor] = {}  # what the forward pass uses, packed
        self.factor = settings.decay
        self.search = Search.over(job.progress.total, settings.calibrate, settings.decay)
        kinds: dict[str, Callable[[Tensor], Tensor]] = {
            "rows": row_mask,
            "transposable": partial(transposable_mask, norm=settings.norm),
            "greedy": greedy_mask,
            "torch_default": torch_default_mask,
        }
        self._mask = kinds[settings.mask]

    @property
    def two_four(self) -> bool:
        """Not while the factor is searched for: some rows train dense."""
        return self.search is None and not self.dense

    def prepare(self, name: str, weight: Tensor) -> None:
        size = weight.shape[0], -(-weight.shape[1] // 8)
        self.masks[name] = torch.full(size, ALL, dtype=torch.uint8, device=weight.device)

    def forget(self, name: str) -> None:
        del self.masks[name]

    def weight(self, name: str, weight: Tensor) -> Tensor:
        return Pruned.apply(weight, self.masks[name])

    def pruned(
        self, name: str, weight: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return pruned_forms(weight, self.masks[name], dtype, straight=straight, transposed=transposed)

    def start(self) -> None:
        self._refresh()

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """The mask that these rows of a weight, this rank's, would have now; packed."""
        return pack(self._mask(self.scores(name, weight)))

    def scores(self, name: str, weight: Tensor) -> Tensor:
        """What the entries of these rows of a weight are compared by."""
        return weight

    def before_step(self) -> None:
        """Go over to the dense tail, end the search, and compute masks where it is time."""
        progress, search = self.job.progress, self.search
        if search is not None and progress.step >= search.steps:
            self.factor, self.search = search.found(), None
            self._refresh()
        was_dense, self.dense = self.dense, self._in_tail()  # a run that resumes for longer leaves its tail
        if self.dense:
            for mask in self.masks.values():
                mask.fill_(ALL)
        elif was_dense or progress.step % (self.search.interval if self.search else self.settings.refresh) == 0:
            self._refresh()
        self.job.numbers["decay"] = 0.0 if self.dense else self.factor

    def _in_tail(self) -> bool:
        progress, share = self.job.progress, self.settings.tail
        return bool(progress.total and share) and progress.position >= (1 - share) * progress.total

    @torch.no_grad()
    def _refresh(self) -> None:
        trained = self.job.trained
        for name, mask in self.masks.items():
            weight = trained[f"{name}.weight"]
            wanted = gathered(self.mask(name, local(weight)), weight)
            if self.search is not None:
                wanted = self.search.see(name, wanted, self.job.progress.step)
            mask.copy_(wanted)

    @torch.no_grad()
    def before_update(self) -> None:
        """Add to the gradients of masked weights their decay; after clipping, so that it is not clipped away, and
        before the optimizer, whose second moment makes it larger where gradients are small."""
        if self.dense or not (self.factor or self.search):
            return
        trained = self.job.trained
        for name, mask in self.masks.items():
            weight = trained[f"{name}.weight"]
            if weight.grad is None:
                continue
            own = local(weight)
            out = own.masked_fill(unpack(own_rows(mask, weight), own.shape[1]), 0)
            if self.search is not None:
                factors = self.search.factors_of_rows(len(mask), mask.device).to(own.dtype)
                local(weight.grad).addcmul_(out, own_rows(factors[:, None], weight))
            else:
                local(weight.grad).add_(self.scaled(name, out), alpha=self.factor)

    def scaled(self, name: str, out: Tensor) -> Tensor:
        """What the factor multiplies, of the masked weights of a layer."""
        return out

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"masks": dict(self.masks), "factor": self.factor, "dense": self.dense}
        return state | ({"search": self.search.state_dict()} if self.search else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor, self.dense = state_dict["factor"], state_dict["dense"]
        for name, mask in self.masks.items():
            mask.copy_(state_dict["masks"][name])
        if "search" not in state_dict:
            self.search = None
        elif self.search is not None:
            self.search.load_state_dict(state_dict["search"])
