"""Training with masked weights: masks are refreshed every few steps, masked weights decay, and the last steps are
dense.

Every rank holds the masks of whole weights, at one bit per weight, to mask the weights that FSDP2 gathers. Under FSDP2
each rank computes the masks of its own rows, and an all-gather distributes the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.sharded import local_part
from shoestring.sparse import kernels
from shoestring.sparse.calibration import Search
from shoestring.sparse.masks import greedy_mask, prune, row_mask, torch_default_mask, transposable_mask
from shoestring.sparse.product import Pruned, pack, unpack
from shoestring.sparse.shards import gathered, own_rows

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.sparse.settings import Masked

ALL = 255  # a byte of a packed mask that keeps all eight weights


def pruned(weight: Tensor, packed: Tensor) -> Tensor:
    """Apply a packed mask: return the weight with zeros where the mask is 0."""
    return prune(weight, unpack(packed.to(weight.device), weight.shape[1]))


def pruned_forms(
    weight: Tensor, packed: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Apply a packed mask, and return the masked weight and its transpose as `operands.Pruning` does."""
    if kernels.usable(weight):
        return kernels.pruned(weight.contiguous(), packed, dtype, straight=straight, transposed=transposed)
    masked = pruned(weight, packed).to(dtype)
    return masked if straight else None, masked.t().contiguous() if transposed else None


class Masks:
    """Masks by magnitude, with decay of masked weights and a dense tail; see `attached.SparseMethod`."""

    def __init__(self, attachments: Attachments, settings: Masked) -> None:
        self.attachments, self.settings, self.fp8, self.dense = attachments, settings, False, False
        self.masks: dict[str, Tensor] = {}  # masks of whole weights for the forward pass, packed
        self.factor = settings.masked_decay  # decay factor of masked weights
        self.search = Search.over(attachments.progress.total, settings.calibrate, settings.masked_decay)
        kinds: dict[str, Callable[[Tensor], Tensor]] = {
            "rows": row_mask,
            "transposable": partial(transposable_mask, norm=settings.norm),
            "greedy": greedy_mask,
            "torch_default": torch_default_mask,
        }
        self._mask = kinds[settings.mask]

    @property
    def two_four(self) -> bool:
        """Whether all weights are 2:4; False while the decay factor is searched, because some rows then train dense."""
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
        """Compute the mask of this rank's rows of `weight` from the current values, as packed bits."""
        return pack(self._mask(self.scores(name, weight)))

    def scores(self, name: str, weight: Tensor) -> Tensor:
        """Scores of `weight` (this rank's rows); masks keep the entries with the largest |score|. Here the scores are
        the weights."""
        return weight

    def before_step(self) -> None:
        """End the search for the decay factor, start the dense tail, and refresh masks, each when it is due."""
        progress, search = self.attachments.progress, self.search
        if search is not None and progress.step >= search.steps:
            self.factor, self.search = search.found(), None
            self._refresh()
        tail = self.settings.tail
        in_tail = bool(progress.total and tail) and progress.position >= (1 - tail) * progress.total
        was_dense, self.dense = self.dense, in_tail  # a run resumed with more steps leaves the tail
        if self.dense:
            for mask in self.masks.values():
                mask.fill_(ALL)
        elif was_dense or progress.step % (self.search.interval if self.search else self.settings.refresh) == 0:
            self._refresh()
        self.attachments.numbers["decay"] = 0.0 if self.dense else self.factor

    @torch.no_grad()
    def _refresh(self) -> None:
        trained = self.attachments.trained
        for name, mask in self.masks.items():
            weight = trained[f"{name}.weight"]
            newest = gathered(self.mask(name, local_part(weight)), weight)
            if self.search is not None:
                newest = self.search.see(name, newest, self.attachments.progress.step)
            mask.copy_(newest)  # in place, because captured graphs and compiled code read this tensor

    @torch.no_grad()
    def before_update(self) -> None:
        """Add the decay term of masked weights to the gradients of these weights.

        The decay is added after clipping, which would reduce it, and before the optimizer: Adam divides the decay by
        the root of the second moment, so that the decay has more effect where gradients are small.
        """
        if self.dense or not (self.factor or self.search):
            return
        trained = self.attachments.trained
        for name, mask in self.masks.items():
            weight = trained[f"{name}.weight"]
            if weight.grad is None:
                continue
            own = local_part(weight)
            dropped = own.masked_fill(unpack(own_rows(mask, weight), own.shape[1]), 0)
            if self.search is not None:
                factors = self.search.factors_of_rows(len(mask), mask.device).to(own.dtype)
                local_part(weight.grad).addcmul_(dropped, own_rows(factors[:, None], weight))
            else:
                local_part(weight.grad).add_(self.scaled(name, dropped), alpha=self.factor)

    def scaled(self, name: str, dropped: Tensor) -> Tensor:
        """Scale a layer's masked weights before the decay factor is applied; here they are unchanged."""
        return dropped

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
