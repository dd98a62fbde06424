"""S-STE: a soft threshold shrinks the weights, and a scale per layer, fixed at the start, multiplies the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.sharded import local_part
from shoestring.sparse import kernels
from shoestring.sparse.masks import row_mask
from shoestring.sparse.product import FORWARD, Shrinking, pack, rounded, shrink
from shoestring.sparse.shards import summed

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.sparse.settings import SSTE

__all__ = ["Shrunk", "least_squares_scale", "shrink"]


def least_squares_scale(weight: Tensor) -> Tensor:
    """The scale b that minimises |weight - b shrink(weight)|², or 1 if shrinking leaves only zeros; fp64, 0-d.

    For a DTensor, the result is the scale of the whole weight: ranks all-reduce two numbers.
    """
    part = local_part(weight).detach()
    shrunk = shrink(part).double()
    products = summed(torch.stack([(part * shrunk).sum(), shrunk.square().sum()]), weight)
    return torch.where(products[1] > 0, products[0] / products[1], torch.ones_like(products[0]))


class Shrunk:
    """Soft-thresholded weights of S-STE; see `attached.SparseMethod`."""

    def __init__(self, attachments: Attachments, settings: SSTE) -> None:
        self.attachments, self.fp8, self.dense, self.two_four = attachments, settings.simulate_fp8, False, True
        self.scales: dict[str, Tensor] = {}

    def prepare(self, name: str, weight: Tensor) -> None:
        self.scales[name] = torch.ones((), dtype=weight.dtype, device=weight.device)

    def forget(self, name: str) -> None:
        del self.scales[name]

    def weight(self, name: str, weight: Tensor) -> Tensor:
        return Shrinking.apply(weight, self.scales[name])

    def pruned(
        self, name: str, weight: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        scale = self.scales[name]
        shrunk = kernels.shrunk(weight, scale, dtype) if kernels.usable(weight) else (shrink(weight) * scale).to(dtype)
        shrunk = rounded(shrunk, FORWARD) if self.fp8 else shrunk
        return shrunk if straight else None, shrunk.t().contiguous() if transposed else None

    def start(self) -> None:
        """Compute the scales from the initial weights, which are already equal on all ranks."""
        trained = self.attachments.trained
        for name, scale in self.scales.items():
            scale.copy_(least_squares_scale(trained[f"{name}.weight"]))

    def before_step(self) -> None:
        return

    def before_update(self) -> None:
        return

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """The mask of this rank's rows: the two largest of every four weights, which stay nonzero; packed to bits."""
        return pack(row_mask(weight))

    def state_dict(self) -> dict[str, Any]:
        return {"scales": dict(self.scales)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, scale in self.scales.items():
            scale.copy_(state_dict["scales"][name])
