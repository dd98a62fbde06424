"""The weights of S-STE: shrunk by a soft threshold, and stretched by a scale that stays as it was at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.sparse import kernels
from shoestring.sparse.masks import row_mask
from shoestring.sparse.product import FORWARD, Shrinking, pack, rounded, shrink
from shoestring.sparse.shards import local, summed

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.sparse.settings import SSTE

__all__ = ["Shrunk", "least_squares_scale", "shrink"]


def least_squares_scale(weight: Tensor) -> Tensor:
    """The b that minimises |weight - b shrink(weight)|²; 1 where nothing is left. fp64, 0-d.

    Of a DTensor, that of the whole weight: its ranks add up two numbers.
    """
    part = local(weight).detach()
    left = shrink(part).double()
    products = summed(torch.stack([(part * left).sum(), left.square().sum()]), weight)
    return torch.where(products[1] > 0, products[0] / products[1], torch.ones_like(products[0]))


class Shrunk:
    """See `attached.SparseMethod`."""

    def __init__(self, job: Job, settings: SSTE) -> None:
        self.job, self.fp8, self.dense, self.two_four = job, settings.fp8, False, True
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
        left = kernels.shrunk(weight, scale, dtype) if kernels.usable(weight) else (shrink(weight) * scale).to(dtype)
        left = rounded(left, FORWARD) if self.fp8 else left
        return left if straight else None, left.t().contiguous() if transposed else None

    def start(self) -> None:
        """The scales, from the weights that training starts with; ranks have the same ones by now."""
        trained = self.job.trained
        for name, scale in self.scales.items():
            scale.copy_(least_squares_scale(trained[f"{name}.weight"]))

    def before_step(self) -> None:
        return

    def before_update(self) -> None:
        return

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """This rank's rows of the mask of the two largest of four, which the threshold leaves; packed."""
        return pack(row_mask(weight))

    def state_dict(self) -> dict[str, Any]:
        return {"scales": dict(self.scales)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, scale in self.scales.items():
            scale.copy_(state_dict["scales"][name])
